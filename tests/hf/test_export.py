"""export.py writes a whole folder or none, says what it leaves out, and refuses what Mixtral and Llama cannot say."""

import errno
import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from simbal import hf
from simbal.errors import UserError
from simbal.hf.card import model_card
from simbal.hf.export import FILES, NO_TOKENIZER, export
from simbal.runs.folder import RunFolder
from tests.forged_runs import forge
from tests.programs import run

SPARSE = ("balancing=simbal", "model.init_std=0.2")


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "exports" / "model"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("router=sigmoid", "balancing=lbl"), "router.gating=sigmoid: Mixtral gates by a softmax"),
        (("data.document_mask=true", "balancing=lbl"), "data.document_mask=true"),
        (("balancing=lf_simbal",), "balancing.lf steers the choice of experts"),
        (("balancing=hash",), "balancing.hash steers the choice"),
        (("balancing=[lbl,logit_norm]",), "balancing.logit_norm adjusts the router's logits"),
    ],
)
def test_what_mixtral_cannot_say_is_refused_with_the_reason_before_anything_is_written(run_of, target, overrides, says):
    run = run_of(*overrides, "trainer.max_steps=2", "trainer.val_every=2")
    with pytest.raises(UserError) as refused:
        export(str(run.path), str(target), overwrite=False)
    assert str(refused.value).startswith(f"{run.path} cannot be exported, for its {says}")
    assert "\n" not in str(refused.value)
    assert not target.parent.exists()


def test_a_run_on_text_is_exported_without_its_data(text_run, tmp_path, monkeypatch, capsys):
    shutil.copytree(text_run.path, run := tmp_path / "run")
    forge(run, "data.cache_dir", str(tmp_path / "nowhere"))  # as on another machine: neither text nor tokens are there
    forge(run, "data.tokenizer_path", str(tmp_path / "nowhere"))  # which is not read
    monkeypatch.chdir(tmp_path)
    export("run", "model", overwrite=False)
    printed = capsys.readouterr().out
    assert f"written: {tmp_path / 'model'}, a MixtralForCausalLM of run" in printed
    assert "tokenizer: AutoTokenizer reads it" in printed
    assert "name the files of its data: look at them before you publish" in printed
    assert {file.name for file in (tmp_path / "model").iterdir()} == FILES
    assert {file.name for file in tmp_path.iterdir()} == {"run", "model"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt = tokenizer("one two three", return_tensors="pt")
    assert prompt.input_ids.tolist() == [text_run.tokenizer().encode(b"one two three").tolist()]
    assert tokenizer.eos_token_id == model.config.eos_token_id == text_run.store.meta["eot"]
    assert model.generate(**prompt, max_new_tokens=3, pad_token_id=0).shape[0] == 1


def test_the_command_exports_a_run_and_leaves_nothing_else(text_run, tmp_path):
    done = run("export.py", f"run={text_run.path}", "to=model", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"written: {tmp_path / 'model'}, a MixtralForCausalLM of {text_run.path}" in done.stdout
    assert [*tmp_path.iterdir()] == [tmp_path / "model"]
    assert {file.name for file in (tmp_path / "model").iterdir()} == FILES


def test_a_run_on_symbols_has_no_tokenizer_and_the_card_says_so(exported):
    _, folder = exported(*SPARSE)
    assert {file.name for file in folder.iterdir()} == FILES - {"tokenizer.json", "tokenizer_config.json"}
    assert NO_TOKENIZER in (folder / "README.md").read_text()


def test_a_place_that_is_taken_is_left_alone(run_of, target):
    run, other = run_of(*SPARSE), run_of("balancing=lbl")
    target.mkdir(parents=True)
    export(str(run.path), str(target), overwrite=False)  # into an empty folder
    first = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(b"damaged")
    export(str(run.path), str(target), overwrite=False)  # over its own
    assert (target / "model.safetensors").read_bytes() == first
    with pytest.raises(UserError, match="holds something other than an export of this run"):
        export(str(other.path), str(target), overwrite=False)
    assert (target / "model.safetensors").read_bytes() == first
    export(str(other.path), str(target), overwrite=True)
    assert json.loads((target / "simbal.json").read_text())["config_hash"] == other.spec.hash
    (target / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="holds 'thesis.tex', which is no file of an export: choose another to="):
            export(str(other.path), str(target), overwrite)
    assert (target / "thesis.tex").read_text() == "years of work"
    assert [file.name for file in target.parent.iterdir()] == ["model"]


def test_a_disk_that_fails_leaves_an_earlier_export(run_of, target, monkeypatch):
    run = run_of(*SPARSE)
    export(str(run.path), str(target), overwrite=False)
    before = {file: file.read_bytes() for file in target.rglob("*")}

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("simbal.hf.export.save_file", refuse)
    with pytest.raises(UserError, match="cannot write .*model: No space left on device; free some space, or choose"):
        export(str(run.path), str(target), overwrite=False)
    assert {file: file.read_bytes() for file in target.rglob("*")} == before
    assert [file.name for file in target.parent.iterdir()] == ["model"]


def test_a_folder_of_runs_is_a_folder_of_exports_and_says_which_it_could_not_write(run_of, tmp_path, target, capsys):
    runs = tmp_path / "runs"
    short = ("trainer.max_steps=2", "trainer.val_every=2")
    whole, steered, dense = (
        shutil.copytree(run.path, runs / run.path.name)
        for run in (run_of(*SPARSE), run_of("balancing=lf", *short), run_of("balancing=none", "model.num_experts=0"))
    )
    with pytest.raises(UserError, match="1 of the 3 finished runs in .*runs could not be exported"):
        export(str(runs), str(target), overwrite=False)
    assert f"not exported: {steered} cannot be exported, for its balancing.lf steers" in capsys.readouterr().out
    assert {file.name for file in target.iterdir()} == {whole.name, dense.name}
    assert hf.from_pretrained(target / whole.name).shape.num_experts == 4
    shutil.rmtree(steered)
    export(str(runs), str(target), overwrite=False)


def test_unfinished_and_damaged_runs_are_refused(run_of, tmp_path, target):
    run = shutil.copytree(run_of(*SPARSE).path, tmp_path / "run")
    checkpoint = run / "checkpoints" / "final.ckpt"
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[:-50])
    with pytest.raises(UserError, match="final.ckpt is damaged"):
        export(str(run), str(target), overwrite=False)
    checkpoint.write_bytes((run_of("balancing=lbl").path / "checkpoints" / "final.ckpt").read_bytes())
    with pytest.raises(UserError, match="final.ckpt belongs to another run"):
        export(str(run), str(target), overwrite=False)
    record = RunFolder(run).read_record()
    RunFolder(run).write_record(record | {"status": "killed"})
    with pytest.raises(UserError, match="is not finished"):
        export(str(run), str(target), overwrite=False)
    (run / "record.json").write_text("{}")
    with pytest.raises(UserError, match="record.json is damaged"):
        export(str(run), str(target), overwrite=False)
    assert not target.parent.exists()


def test_the_card_says_what_the_record_knows(text_run):
    record = RunFolder(text_run.path).read_record()
    card = model_card(text_run.path, text_run.spec, record, text_run.model, "There is one.")
    for part in (
        "`MixtralForCausalLM`", "4 experts of width 8", "12 steps, 1,536 tokens, seed 0",
        record["code"]["version"], str(record["code"]["commit"]), record["config_hash"],
        record["versions"]["torch"], record["objective"]["simbal"]["formula"], "its coefficient `0.1`", "There is one.",
        "balancing.simbal.coef=0.1", "optim.lr=0.01", "library_name: transformers",
    ):  # fmt: skip
        assert part in card, part
    for name, value in record["metrics"].items():
        assert f"- `{name}` = {value:.6g}: `{record['definitions'][name]}`" in card
    assert "cache_dir" not in card
    assert "output_dir" not in card
