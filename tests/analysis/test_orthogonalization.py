"""Golden numbers of the paper's table of distances from orthonormality, and what ours say about it."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from simbal.analysis import orthogonalization as orthonormal
from simbal.analysis.orthogonalization import PAPER, measured, notes, verdict
from simbal.metrics.similarity import identity_deviation, max_deviation, mean_deviation, mean_squared_deviation
from simbal.model.init import generator


def generators(trials):
    return [generator(0, f"test/{trial}") for trial in range(trials)]


@pytest.fixture(scope="module")
def drawn_TED():
    return orthonormal.ortho_init(32, 1536, generators(100))


@pytest.fixture(scope="module")
def results(drawn_TED):
    """The paper's shape; fewer trials of Trained, which takes longest."""
    weights = {
        "Trained": orthonormal.trained(drawn_TED[:8], steps=100, lr=1e-4, final_lr=1e-5),
        "Param": orthonormal.parametrized(32, 1536, generators(100)),
        "OrthoInit": drawn_TED,
    }
    assert {weight_TED.dtype for weight_TED in weights.values()} == {torch.bfloat16}
    return {way: measured(weight_TED) for way, weight_TED in weights.items()}


@pytest.mark.parametrize("way", ["Param", "OrthoInit"])
@pytest.mark.parametrize(("distance", "tolerance"), [("Max Dev", 0.08), ("L1 Dist", 0.02)])
def test_routers_cast_to_bf16_are_as_far_from_orthonormal_as_the_paper_says(results, way, distance, tolerance):
    assert results[way][distance]["bf16"].mean == pytest.approx(PAPER[way][distance].mean, rel=tolerance)


def test_a_hundred_trained_steps_come_within_a_factor_of_two_of_the_paper(results):
    trained = results["Trained"]
    assert trained["Max Dev"]["bf16"].mean < 2e-5
    assert 8.52e-7 < trained["L1 Dist"]["bf16"].mean < 2.5e-6


def test_the_order_flips_when_the_product_is_in_fp32(results):
    trained, drawn = results["Trained"]["Max Dev"], results["OrthoInit"]["Max Dev"]
    assert trained["bf16"].mean < drawn["bf16"].mean / 10
    assert trained["fp32"].mean > drawn["fp32"].mean
    assert any("the order flips" in note for note in notes(results, comparable=True))


def test_trials_together_end_where_each_would_end_alone(drawn_TED):
    together_TED = orthonormal.trained(drawn_TED[:3], steps=5, lr=1e-4, final_lr=1e-5)
    for start_ED, end_ED in zip(drawn_TED[:3], together_TED, strict=True):
        alone_TED = orthonormal.trained(start_ED[None], steps=5, lr=1e-4, final_lr=1e-5)
        assert torch.equal(alone_TED[0], end_ED)
    together_TED = orthonormal.parametrized(32, 1536, generators(3))
    assert torch.equal(orthonormal.parametrized(32, 1536, generators(1))[0], together_TED[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_distances_of_a_batch_are_those_of_each_router(drawn_TED, dtype):
    for distance in (identity_deviation, max_deviation, mean_deviation, mean_squared_deviation):
        one_by_one = torch.stack([distance(weight_ED, dtype) for weight_ED in drawn_TED[:3]])
        torch.testing.assert_close(distance(drawn_TED[:3], dtype), one_by_one, rtol=1e-5, atol=1e-7)


def test_the_parametrisation_without_trivialization_is_torchs_default_up_to_the_rounding_of_fp32():
    linear = nn.Linear(64, 8, bias=False)
    with torch.no_grad():
        linear.weight.uniform_(-(64**-0.5), 64**-0.5, generator=generators(1)[0])
    default_ED = parametrizations.orthogonal(linear).weight
    ours_ED = orthonormal.parametrized(8, 64, generators(1))[0]
    torch.testing.assert_close(ours_ED.float(), default_ED, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("way", "distance", "ratio", "words"),
    [
        ("Param", "Max Dev", 1.079, "matches: 1.08"), ("Param", "Max Dev", 0.9, "differs: 0.90"),
        ("Param", "L1 Dist", 1.079, "differs: 1.08"), ("Trained", "L1 Dist", 1.85, "within 2x: 1.85"),
        ("Trained", "L1 Dist", 0.45, "differs: 0.45"), ("Trained", "L1 Dist", 1.0, "matches: 1.00"),
    ],
)  # fmt: skip
def test_a_mean_matches_within_its_tolerance_and_differs_beyond(way, distance, ratio, words):
    assert verdict(way, distance, ratio) == words
