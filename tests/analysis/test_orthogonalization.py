"""The analysis `orthogonalization`: the paper's table 2."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from simbal.analysis.orthogonalization import (
    PAPER,
    init_orthogonal,
    measure_routers,
    notes,
    parametrize,
    train_routers,
    verdict,
)
from simbal.model.init import generator

TRIALS = 40


def generators(trials):
    return [generator(0, f"test/{trial}") for trial in range(trials)]


@pytest.fixture(scope="module")
def initial_TED():
    return init_orthogonal(32, 1536, generators(TRIALS))


@pytest.fixture(scope="module")
def results(initial_TED):
    weights = {
        "Trained": train_routers(initial_TED[:4], steps=100, lr=1e-4, final_lr=1e-5),
        "Param": parametrize(32, 1536, generators(TRIALS)),
        "OrthoInit": initial_TED,
    }
    assert {weight_TED.dtype for weight_TED in weights.values()} == {torch.bfloat16}
    return {kind: measure_routers(weight_TED) for kind, weight_TED in weights.items()}


def test_distances_agree_with_the_paper(results):
    for kind in ("Param", "OrthoInit"):
        for distance, tolerance in (("Max Dev", 0.08), ("L1 Dist", 0.02)):
            assert results[kind][distance]["bf16"].mean == pytest.approx(PAPER[kind][distance].mean, rel=tolerance)
    trained = results["Trained"]
    assert trained["Max Dev"]["bf16"].mean < 2e-5
    assert 8.52e-7 < trained["L1 Dist"]["bf16"].mean < 2.5e-6


def test_the_order_flips_with_an_fp32_product(results):
    trained, initial = results["Trained"]["Max Dev"], results["OrthoInit"]["Max Dev"]
    assert trained["bf16"].mean < initial["bf16"].mean / 10
    assert trained["fp32"].mean > initial["fp32"].mean
    assert any("the order flips" in note for note in notes(results, comparable=True))


def test_trials_do_not_affect_each_other(initial_TED):
    together_TED = train_routers(initial_TED[:2], steps=5, lr=1e-4, final_lr=1e-5)
    alone_TED = train_routers(initial_TED[1:2], steps=5, lr=1e-4, final_lr=1e-5)
    assert torch.equal(alone_TED[0], together_TED[1])
    assert torch.equal(parametrize(32, 1536, generators(1))[0], parametrize(32, 1536, generators(3))[0])


def test_parametrization_equals_torchs_default_up_to_rounding():
    linear = nn.Linear(64, 8, bias=False)
    with torch.no_grad():
        linear.weight.uniform_(-(64**-0.5), 64**-0.5, generator=generators(1)[0])
    default_ED = parametrizations.orthogonal(linear).weight
    torch.testing.assert_close(parametrize(8, 64, generators(1))[0].float(), default_ED, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "distance", "ratio", "expected"),
    [
        ("Param", "Max Dev", 1.079, "matches"), ("Param", "Max Dev", 0.9, "differs"),
        ("Param", "L1 Dist", 1.079, "differs"), ("Trained", "L1 Dist", 1.85, "within 2x"),
        ("Trained", "L1 Dist", 0.45, "differs"), ("Trained", "L1 Dist", 1.0, "matches"),
    ],
)  # fmt: skip
def test_a_mean_matches_within_its_tolerance(kind, distance, ratio, expected):
    assert verdict(kind, distance, ratio) == f"{expected}: {ratio:.2f}"
