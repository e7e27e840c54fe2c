"""Values worked out by hand, on the tensor used throughout the tests of losses."""

import math

import pytest
import torch

from simbal.metrics import language, load
from simbal.metrics.orthogonality import identity_deviation, mean_squared_deviation
from simbal.metrics.routing import sequence_expert_use, topk_entropy

EXPERTS_NK = torch.tensor([[0, 1], [0, 2], [3, 2], [1, 0]])
WEIGHTS_NK = torch.tensor([[0.4, 0.3], [0.5, 0.3], [0.4, 0.3], [0.4, 0.3]]).double()
COUNTS_E = torch.tensor([3, 2, 2, 1])


def test_sequence_expert_use_counts_distinct_experts_of_each_sequence():
    assert sequence_expert_use(EXPERTS_NK, num_sequences=2, num_experts=4).tolist() == [0.75, 1.0]


def test_topk_entropy_is_that_of_the_renormalised_weights():
    entropy_N = topk_entropy(WEIGHTS_NK)
    assert entropy_N.tolist() == pytest.approx([0.682908, 0.661563, 0.682908, 0.682908], abs=1e-6)
    assert entropy_N.mean().item() == pytest.approx(0.677572, abs=1e-6)


def test_load_metrics():
    assert load.max_vio(COUNTS_E).item() == pytest.approx(0.5)
    assert load.unique_experts(COUNTS_E).item() == 4
    assert load.max_vio(torch.tensor([10, 6, 4, 4])).item() == pytest.approx(0.6667, abs=1e-4)


def test_load_metrics_of_layers_are_those_of_each_layer_and_of_a_collapse_are_extreme():
    counts_LE = torch.stack([COUNTS_E, torch.tensor([8, 0, 0, 0])])
    assert load.max_vio(counts_LE).tolist() == pytest.approx([0.5, 3.0])
    assert load.unique_experts(counts_LE).tolist() == [4, 1]


def test_squared_deviation_of_a_small_router():
    weight_ED = torch.tensor([[1, 0.5, 0], [0, 1, -0.5]])
    assert mean_squared_deviation(weight_ED, torch.float32).item() == pytest.approx(0.15625)


@pytest.mark.parametrize(("entry", "quanta"), [(0.99609375, 1), (1.0078125, 4)])
def test_one_bf16_diagonal_entry_off_by_an_ulp_gives_the_papers_quantum(entry, quanta):
    rows_ED = torch.eye(32)
    rows_ED[0, 0] = 0.5
    rows_ED = torch.cat([rows_ED, torch.zeros(32, 1)], 1)
    rows_ED[0, 32] = (entry - 0.25) ** 0.5  # row 0 has squared norm `entry` before rounding
    assert mean_squared_deviation(rows_ED, torch.bfloat16).item() == pytest.approx(quanta * 2**-26, rel=1e-6)


def test_fp32_deviation_stays_fp32_under_autocast():
    rows_ED = torch.linalg.qr(torch.randn(64, 8, generator=torch.Generator().manual_seed(0))).Q.T
    with torch.autocast("cpu", torch.bfloat16):
        assert identity_deviation(rows_ED, torch.float32).abs().max() < 5e-6


def test_bits_per_byte_and_perplexity():
    assert language.perplexity(3 * math.log(7), 3) == pytest.approx(7)
    assert language.bits_per_byte(8 * math.log(2), 4) == pytest.approx(2)
    assert language.perplexity(1e6, 1) == math.inf
