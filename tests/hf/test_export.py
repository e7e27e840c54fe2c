"""An export equals the run's model in transformers, is complete or absent, and names no local path."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from simbal import hf
from simbal.errors import UserError
from simbal.hf.export import FILES, export
from simbal.runs.folder import RunFolder
from simbal.training.build import build_module
from tests.forged_runs import forge
from tests.in_process import run as run_program

SPARSE = ("balancing=simbal", "model.init_std=0.3")
DENSE = ("balancing=none", "model.init_std=0.3", "model.num_experts=0")
RUNS = {  # keys of a run, and the class that it is exported as
    (*SPARSE, "model.num_kv_heads=1", "model.head_dim=4"): "MixtralForCausalLM",
    (*SPARSE, "model.tie_embeddings=true", "model.rope_theta=300.0", "model.norm_eps=0.01"): "MixtralForCausalLM",
    ("balancing=ortho_param", "model.init_std=0.3"): "MixtralForCausalLM",
    ("balancing=sinkhorn", "model.init_std=0.3"): "MixtralForCausalLM",
    (*SPARSE, "model.num_kv_heads=1", "model.qk_norm=head", "router.renormalize=false"): "Qwen3MoeForCausalLM",
    (*SPARSE, "model.num_kv_heads=1", "model.qk_norm=projection", "model.tie_embeddings=true"): "OlmoeForCausalLM",
    (*DENSE, "model.top_k=0", "model.tie_embeddings=true", "model.head_dim=4"): "LlamaForCausalLM",
    (*DENSE, "model.num_kv_heads=1", "model.qk_norm=head", "model.head_dim=12"): "Qwen3ForCausalLM",
}


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "exports" / "model"


def logits(model, run) -> torch.Tensor:
    return model(tokens_of(run), run.module.balancing)[0] @ model.head_VD.T


def tokens_of(run) -> torch.Tensor:
    shape = (4, run.spec.config.data.seq_len)
    return torch.randint(0, run.model.shape.vocab_size, shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize(("keys", "kind"), [pytest.param(*case, id=",".join(case[0])) for case in RUNS.items()])
def test_an_export_has_the_runs_logits_in_transformers_and_is_loaded_with_the_same_bits(run_of, target, keys, kind):
    run = run_of(*keys, "model.kernels=torch")  # as in the loaded model
    export(str(run.path), str(target), overwrite=False)
    theirs, loading = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert (type(theirs).__name__, theirs.dtype) == (kind, torch.float32)
    assert not any(loading.values()), loading
    last = run.model.shape.vocab_size - 1
    assert (theirs.generation_config.eos_token_id, theirs.generation_config.bos_token_id) == (last, last)
    assert theirs.config.max_position_embeddings == run.spec.config.data.seq_len
    assert {file.name for file in target.iterdir()} == FILES - {"tokenizer.json", "tokenizer_config.json"}
    ours_BSV = logits(run.model, run)
    assert ours_BSV.std() > 0.1
    torch.testing.assert_close(ours_BSV, theirs(tokens_of(run)).logits, atol=1e-4, rtol=1e-5)
    back = hf.from_pretrained(target, run.model.backend or "reference")
    assert torch.equal(logits(back, run), ours_BSV)
    if "ortho_param" not in keys[0]:  # whose router is parametrized
        build_module(run.spec, run.store, run.device, "32-true").model.load_state_dict(back.state_dict())


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        (("model.qk_norm=projection", "model.num_experts=0"), "model.qk_norm=projection with model.num_experts=0"),
        (("model.qk_norm=projection", "model.head_dim=4"), "model.head_dim=4: OLMoE"),
        (("model.num_experts=0", "model.num_heads=3", "model.head_dim=4"), "model.d_model=16: Llama"),
        (("router.renormalize=false",), "router.renormalize=false: Mixtral"),
        (("model.qk_norm=head", "router=sigmoid"), "router.gating=sigmoid: Qwen3-MoE"),
        (("balancing=hash",), "balancing.hash changes the choice of experts"),
        (("balancing=[lbl,logit_norm]",), "balancing.logit_norm adjusts the router logits"),
        (("model.num_shared_experts=1",), "model.num_shared_experts=1"),
        (("data.document_mask=true",), "data.document_mask=true"),
    ],
)
def test_a_run_that_no_architecture_computes_is_refused_before_anything_is_written(run_of, target, keys, part):
    run = run_of(*(() if any(key.startswith("balancing") for key in keys) else ("balancing=none",)), *keys)
    with pytest.raises(UserError) as refused:
        export(str(run.path), str(target), overwrite=False)
    assert str(refused.value).startswith(f"{run.path} cannot be exported: {part}")
    assert not target.parent.exists()


def test_a_run_on_text_is_exported_without_its_data_and_names_no_path(text_run, tmp_path):
    shutil.copytree(text_run.path, run := tmp_path / "run")
    forge(run, "data.cache_dir", str(tmp_path / "nowhere"))  # as on another machine
    forge(run, "data.tokenizer_path", str(tmp_path / "nowhere"))  # is not read
    done = run_program(tmp_path, "export.py", "run=run", "to=model")
    assert (done.returncode, done.stderr) == (0, "")
    folder = tmp_path / "model"
    assert str(folder) in done.stdout
    assert {file.name for file in folder.iterdir()} == FILES
    assert {file.name for file in tmp_path.iterdir()} == {"run", "model"}
    for name in ("README.md", "simbal.json", "config.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        assert "corpus.txt" not in text
        assert str(tmp_path.parent) not in text
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("one two three", return_tensors="pt")
    assert prompt.input_ids.tolist() == [text_run.tokenizer().encode(b"one two three").tolist()]
    assert tokenizer.eos_token_id == model.config.eos_token_id == text_run.store.meta["eot"]
    record, card = RunFolder(text_run.path).read_record(), (folder / "README.md").read_text()
    for part in ("`MixtralForCausalLM`", record["config_hash"], record["objective"]["simbal"]["formula"]):
        assert part in card
    for name, value in record["metrics"].items():
        assert f"- `{name}` = {value:.6g}: `{record['definitions'][name]}`" in card


def test_other_exports_are_kept_unless_overwritten_and_other_files_always(run_of, target):
    run, other = run_of(*SPARSE), run_of(*DENSE)
    target.mkdir(parents=True)
    export(str(run.path), str(target), overwrite=False)  # into an empty folder
    first = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(b"damaged")
    export(str(run.path), str(target), overwrite=False)  # the same run
    assert (target / "model.safetensors").read_bytes() == first
    with pytest.raises(UserError, match="export of another run"):
        export(str(other.path), str(target), overwrite=False)
    export(str(other.path), str(target), overwrite=True)
    assert json.loads((target / "simbal.json").read_text())["config_hash"] == other.spec.hash
    (target / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="contains 'thesis.tex'"):
        export(str(other.path), str(target), overwrite=True)
    assert (target / "thesis.tex").read_text() == "years of work"
    assert [file.name for file in target.parent.iterdir()] == ["model"]


def test_a_full_disk_leaves_the_earlier_export(run_of, target, monkeypatch):
    run = run_of(*SPARSE)
    export(str(run.path), str(target), overwrite=False)
    before = {file: file.read_bytes() for file in target.rglob("*")}

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("simbal.hf.export.save_file", refuse)
    with pytest.raises(UserError, match="cannot write .*model: No space left on device"):
        export(str(run.path), str(target), overwrite=False)
    assert {file: file.read_bytes() for file in target.rglob("*")} == before
    assert [file.name for file in target.parent.iterdir()] == ["model"]


def test_a_folder_of_runs_is_exported_and_failures_are_reported_at_the_end(run_of, tmp_path, target, capsys):
    runs = tmp_path / "runs"
    sparse, steered, dense = (
        shutil.copytree(run_of(*keys).path, runs / run_of(*keys).path.name)
        for keys in (SPARSE, ("balancing=hash",), DENSE)
    )
    with pytest.raises(UserError, match="1 of 3 finished runs in .*runs could not be exported"):
        export(str(runs), str(target), overwrite=False)
    assert f"not exported: {steered}" in capsys.readouterr().out
    assert {file.name for file in target.iterdir()} == {sparse.name, dense.name}
    assert hf.from_pretrained(target / sparse.name).shape.num_experts == 4


ANALYSES = [
    "quality", "redundancy", "routing", "orthogonality", "dropping", "pruning", "counterfactual", "margin",
    "coactivation", "ep_load",
]  # fmt: skip


@pytest.mark.slow
def test_a_run_and_its_export_have_the_same_numbers_in_every_analysis(text_run, tmp_path):
    spec = text_run.spec
    export(str(spec.path), str(tmp_path / "exported"), overwrite=False)
    sweep, data = spec.path.parent, spec.config.data
    text = [f"data.{key}={getattr(data, key)}" for key in ("files", "txt_split", "validation_one_in", "cache_dir")]
    analyses = f"analysis=[{','.join(ANALYSES)}]"
    of_run = run_program(tmp_path, "evaluate.py", f"run={spec.path}", analyses, f"data.cache_dir={data.cache_dir}")
    keys = [f"hf={tmp_path / 'exported'}", f"name={sweep.name}", f"output_dir={sweep.parent}", analyses, "data=files"]
    of_export = run_program(tmp_path, "evaluate.py", *keys, *text)
    for done in (of_run, of_export):
        assert done.returncode == 0, done.stderr
    for analysis in ANALYSES:
        ours, theirs = (
            json.loads((folder / "analysis" / f"{analysis}.json").read_text())["metrics"]
            for folder in (spec.path, sweep / "exported")
        )
        ours = {name: value for name, value in ours.items() if "seconds" not in name and "time" not in name}
        assert {name: theirs[name] for name in ours} == pytest.approx(ours, rel=2e-5, abs=1e-7), analysis
