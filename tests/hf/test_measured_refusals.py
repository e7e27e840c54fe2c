"""What cannot be measured of a model of Hugging Face is one sentence that says why."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from simbal.analysis.evaluate import evaluate
from simbal.errors import UserError
from tests.hf.measured import request, saved
from tests.hf.test_measured import settings


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("whole"), "mixtral")


@pytest.fixture
def model(whole, tmp_path):
    """A copy that a test may break."""
    return shutil.copytree(whole, tmp_path / "model")


def measure(folder, hf, **changes) -> None:
    asked = request(folder, hf, **changes)
    evaluate(settings("quality"), None, False, "cpu", asked.output_dir, hf=asked)


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


def test_pickles_are_not_read(model, tmp_path):
    (model / "model.safetensors").unlink()
    torch.save({}, model / "pytorch_model.bin")
    assert "has neither model.safetensors nor" in says_of(tmp_path, model)


def test_missing_weights_are_not_drawn_at_random(model, tmp_path):
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert "lacks weights of its own config, or has others: model.norm.weight" in says_of(tmp_path, model)


def test_an_architecture_that_transformers_does_not_know(model, tmp_path):
    changed(model, model_type="mixtral_of_tomorrow", architectures=None)
    assert "is no model that transformers loads: " in says_of(tmp_path, model)


def test_code_of_the_folder_is_not_executed(model, tmp_path):
    (model / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    changed(
        model, model_type="own", auto_map={"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"}
    )
    assert "loads: " in says_of(tmp_path, model) or "tokenizer" in says_of(tmp_path, model)
    assert not (tmp_path / "ran").exists()
