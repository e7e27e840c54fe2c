"""The examples do what they say."""

import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
EXAMPLE = EXAMPLES / "fine_tune_mixtral.py"


def test_fine_tuning_a_mixtral_with_simbal_makes_its_routers_orthonormal(capsys):
    names = runpy.run_path(str(EXAMPLE))
    before, after = capsys.readouterr().out.splitlines()
    assert before.startswith("before:")
    assert after.startswith("after:")
    deviations = [[float(number) for number in re.findall(r"\d\.\d+", line)] for line in (before, after)]
    assert [len(of_layers) for of_layers in deviations] == [2, 2]
    for start, end in zip(*deviations, strict=True):
        assert 0 < end < start / 20
    model = names["model"]
    for layer in model.model.layers:
        gram_EE = layer.mlp.gate.weight @ layer.mlp.gate.weight.T
        torch.testing.assert_close(gram_EE, torch.eye(8), atol=0.02, rtol=0)
    assert model(**names["batch"]).loss < 1.0  # and it has learnt its text: 5.5 at the start


def shown(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict, list[str]]:
    names = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    return names, capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_the_trainer_goes_on_from_its_checkpoint(capsys):
    _, lines = shown("fine_tune_with_trainer", capsys)
    first, last = (
        {key: float(number) for key, number in re.findall(r"'([\w/]+)': ([\d.]+)", row)} for row in lines[-3:-1]
    )
    assert (first["step"], last["step"]) == (20, 40)
    assert last["loss"] < first["loss"] / 2
    assert last["max_vio"] < first["max_vio"] / 2
    assert last["aux/SimBal"] < first["aux/SimBal"]
    assert lines[-1] == "resumed to the bit: True"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
def test_lora_with_trained_routers(capsys):
    names, lines = shown("lora_with_routers", capsys)
    first, last = ([float(number) for number in re.findall(r"\d\.\d+", line)] for line in lines)
    assert last[0] < first[0] - 1
    assert all(end < start / 10 for start, end in zip(first[1:], last[1:], strict=True))
    trained = {name.split(".")[-2] for name, weight in names["model"].named_parameters() if weight.requires_grad}
    assert trained == {"default"}  # of LoRA, and of the routers' copies


@pytest.mark.slow
def test_the_bias_of_a_deepseek_v3(capsys):
    names, lines = shown("deepseek_v3_bias", capsys)
    assert "is moved by nothing" in " ".join(lines)
    before, after = (float(line.split()[-1]) for line in lines if "MaxVio" in line)
    assert before > 2
    assert after < 0.5
    assert names["learnt"].abs().max() > 0.1
