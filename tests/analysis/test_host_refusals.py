"""What cannot be measured of a model of Hugging Face is one sentence that says why."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from simbal.analysis.evaluate import evaluate
from simbal.analysis.shared.host_folder import find_host
from simbal.errors import UserError
from tests.analysis.hosts import request, saved
from tests.analysis.test_hosts import settings
from tests.in_process import run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("whole"), "mixtral")


@pytest.fixture
def model(whole, tmp_path):
    """A copy that a test may break."""
    return shutil.copytree(whole, tmp_path / "model")


def measure(folder, hf, **changes) -> None:
    asked = request(folder, hf, **changes)
    evaluate(settings("quality"), None, False, "cpu", asked.output_dir, host=asked)


def says_of(folder, hf) -> str:
    """The sentence with which measuring `hf` is refused."""
    with pytest.raises(UserError) as refused:
        measure(folder, hf)
    said = str(refused.value)
    assert "\n" not in said
    assert not (folder / "outputs").exists()
    return said


def changed(model, **keys: object) -> None:
    config = json.loads((model / "config.json").read_text()) | keys
    (model / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_a_folder_that_is_not_there(tmp_path):
    assert "there is no such folder" in says_of(tmp_path, tmp_path / "nowhere")
    with pytest.raises(UserError, match="hf=7 must be the path of a model's folder"):
        find_host(7)


def test_a_name_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    said = says_of(tmp_path, "nobody/no-such-model")
    assert said.startswith("hf=nobody/no-such-model is no folder here, and the hub does not give it: ")


def test_a_folder_without_a_model(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "config.json is missing: hf= takes the folder of a model" in says_of(tmp_path, tmp_path / "empty")


def test_pickles_are_not_read(model, tmp_path):
    (model / "model.safetensors").unlink()
    assert "has neither model.safetensors nor" in says_of(tmp_path, model)
    torch.save({}, model / "pytorch_model.bin")
    assert "has its weights in files that can hold programs" in says_of(tmp_path, model)


def test_damaged_weights(model, tmp_path):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:4])
    assert "model.safetensors is damaged: " in says_of(tmp_path, model)


def test_an_index_that_names_what_is_not_there(model, tmp_path):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b.safetensors"}}))
    assert "names '../b.safetensors', which is no safetensors file of its folder" in says_of(tmp_path, model)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    assert "b.safetensors cannot be read: it is no file, or missing" in says_of(tmp_path, model)


def test_missing_weights_are_not_drawn_at_random(model, tmp_path):
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert "lacks weights of its own config, or has others: model.norm.weight" in says_of(tmp_path, model)


def test_an_architecture_that_transformers_does_not_know(model, tmp_path):
    changed(model, model_type="mixtral_of_tomorrow", architectures=None)
    assert "is no model that transformers loads: " in says_of(tmp_path, model)
    changed(model, model_type=None)
    assert "names no model_type" in says_of(tmp_path, model)


def test_code_of_the_folder_is_not_executed(model, tmp_path):
    (model / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    changed(
        model, model_type="own", auto_map={"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"}
    )
    assert "loads: " in says_of(tmp_path, model) or "tokenizer" in says_of(tmp_path, model)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_a_tokenizer(model, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    assert "has no tokenizer that transformers reads" in says_of(tmp_path, model)


def test_a_tokenizer_without_an_end_of_text(model, tmp_path):
    keys = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in keys.items() if k != "eos_token"}))
    assert "names no eos_token" in says_of(tmp_path, model)


def test_a_tokenizer_of_another_model(model, tmp_path):
    changed(model, vocab_size=64)
    weights = load_file(model / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:64].clone()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert "has 300 ids, and the model 64" in says_of(tmp_path, model)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"context": 65}, "context=65 is longer than .* takes: max_position_embeddings=64"),
        ({"context": 0}, "context=0 must be a whole number of at least 1"),
        ({"dtype": "int8"}, "dtype=int8 is not one of auto, float32, bfloat16, float16"),
        ({"name": "a/b"}, "name=a/b must be a plain name"),
        ({"data": {}}, "give data=NAME, one of pysource, files, dclm"),
        ({"data": {"source": "synthetic"}}, "data.vocab_size is missing"),
        ({"data": {"source": "prose"}}, "data.source=prose is not one of"),
    ],
)
def test_keys_that_make_no_sense(whole, tmp_path, changes, says):
    with pytest.raises(UserError, match=says):
        measure(tmp_path, whole, **changes)


def test_analyses_that_are_not_of_a_model(whole, tmp_path):
    downstream = {"downstream": {"_target_": "simbal.analysis.downstream.downstream", "tasks": [], "limit": 1,
                                 "batch_size": 1}}  # fmt: skip
    asked = request(tmp_path, whole)
    with pytest.raises(UserError, match="analysis=downstream works on a trained run: give run="):
        evaluate(downstream, None, False, "cpu", asked.output_dir, host=asked)
    with pytest.raises(UserError, match="run= and hf= are two things to measure"):
        evaluate(settings("quality"), "outputs/x", False, "cpu", asked.output_dir, host=asked)
    against = {"routing": settings("routing")["routing"] | {"against": "x"}}
    with pytest.raises(UserError, match="analysis.routing.against=x is for runs"):
        evaluate(against, None, False, "cpu", asked.output_dir, host=asked)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run=outputs/x", "data=pysource"], "data=pysource is the text of hf=: a run is measured on its own data"),
        (["run=outputs/x", "context=64"], "context= is for hf=: leave it out"),
        (["run=outputs/x", "name=mine"], "name= is for hf=: leave it out"),
        (["hf=.", "data=pysource", "data.seq_len=64"], "data.seq_len= decides nothing for hf=, whose windows"),
        (["hf=nowhere/at/all", "data=pysource"], "hf=nowhere/at/all: there is no such folder"),
        (["hf=.", "data=files", "data.files=x.txt", "data.location=y"], "hf= takes the folder of a model"),
    ],
)
def test_the_command_line_says_so_in_a_sentence(tmp_path, words, says):
    done = run(tmp_path, "evaluate.py", *words, "analysis=quality")
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_name_of_the_hub_gives_the_name_of_the_folder(whole, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(whole))
    assert find_host("allenai/OLMoE-1B-7B-0924").name == "OLMoE-1B-7B-0924"
    assert find_host(str(whole)).name == "mixtral"
