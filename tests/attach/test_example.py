"""The example does what it says."""

import re
import runpy
from pathlib import Path

import torch

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "fine_tune_mixtral.py"


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
