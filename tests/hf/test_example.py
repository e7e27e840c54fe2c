"""The examples in the guides work."""

import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def run_example(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict, list[str]]:
    """Return the variables and the printed lines of an example."""
    variables = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    return variables, capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_simbal_makes_the_routers_of_a_mixtral_orthonormal(capsys):
    variables, _ = run_example("fine_tune_mixtral", capsys)
    for layer in variables["model"].model.layers:
        gram_EE = layer.mlp.gate.weight @ layer.mlp.gate.weight.T
        torch.testing.assert_close(gram_EE, torch.eye(8), atol=0.02, rtol=0)


@pytest.mark.slow
def test_the_trainer_resumes_from_its_checkpoint(capsys):
    _, lines = run_example("fine_tune_with_trainer", capsys)
    first, last = ({k: float(v) for k, v in re.findall(r"'([\w/]+)': ([\d.]+)", row)} for row in lines[-3:-1])
    assert all(last[key] < first[key] for key in ("loss", "max_vio", "aux/SimBal"))
    assert lines[-1].endswith("True")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
def test_lora_trains_with_full_routers(capsys):
    _, lines = run_example("lora_with_routers", capsys)
    first, last = ([float(number) for number in re.findall(r"\d\.\d+", line)] for line in lines)
    assert last[0] < first[0] - 1
    assert all(end < start / 10 for start, end in zip(first[1:], last[1:], strict=True))


@pytest.mark.slow
def test_the_bias_of_a_deepseek_v3_is_updated(capsys):
    variables, lines = run_example("deepseek_v3_bias", capsys)
    before, after = (float(line.split()[-1]) for line in lines if "MaxVio" in line)
    assert before > 2
    assert after < 0.5
    assert variables["bias"].abs().max() > 0.1
