"""Values worked out by hand, on the tensor used throughout the tests of losses."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.metrics import routing as load
from simbal.metrics.definitions import bits_per_byte, perplexity
from simbal.metrics.routing import choice_overlap, full_entropy, mutual_information, sequence_expert_use, topk_entropy
from simbal.metrics.similarity import identity_deviation, mean_squared_deviation

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


def test_overload_is_that_of_the_busiest_group_of_neighbours():
    counts_LE = torch.tensor([[4, 3, 1, 0], [2, 2, 2, 2], [0, 0, 0, 8]])
    assert load.overload(counts_LE, 2).tolist() == [1.75, 1, 2]
    assert load.overload(counts_LE, 4).tolist() == [2, 1, 4]
    assert load.overload(counts_LE, 4).tolist() == (load.max_vio(counts_LE) + 1).tolist()
    assert load.overload(counts_LE, 1).tolist() == [1, 1, 1]


def test_chosen_experts_are_a_row_for_each_token_and_an_index_of_all_experts_is_none():
    assert load.chosen_experts(EXPERTS_NK, 4).int().tolist() == [[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1], [1, 1, 0, 0]]
    assert load.chosen_experts(torch.tensor([[2, 4], [4, 4]]), 4).tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]


def test_load_metrics_of_layers_are_those_of_each_layer_and_of_a_collapse_are_extreme():
    counts_LE = torch.stack([COUNTS_E, torch.tensor([8, 0, 0, 0])])
    assert load.max_vio(counts_LE).tolist() == pytest.approx([0.5, 3.0])
    assert load.unique_experts(counts_LE).tolist() == [4, 1]


def test_inequality_and_entropy_of_the_load():
    assert load.gini(COUNTS_E).item() == pytest.approx(0.1875)
    assert load.squared_variation(COUNTS_E).item() == pytest.approx(0.125)
    assert load.load_entropy(COUNTS_E).item() == pytest.approx(1.320888, abs=1e-6)
    assert load.dead_experts(COUNTS_E).item() == 0


def test_a_balanced_load_has_no_inequality_and_a_collapsed_one_as_much_as_there_can_be():
    counts_LE = torch.tensor([[5, 5, 5, 5], [0, 8, 0, 0]])
    assert load.gini(counts_LE).tolist() == pytest.approx([0, 3 / 4])
    assert load.squared_variation(counts_LE).tolist() == pytest.approx([0, 3])
    assert load.load_entropy(counts_LE).tolist() == pytest.approx([math.log(4), 0])
    assert load.dead_experts(counts_LE).tolist() == [0, 3]


def test_an_expert_is_near_dead_below_a_tenth_of_the_mean_and_not_at_it():
    assert load.near_dead_experts(torch.tensor([[0, 9, 10, 381], [10, 10, 190, 190]])).tolist() == [2, 0]


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=9).filter(any))
def test_gini_is_the_mean_difference_of_pairs(counts):
    pairs = sum(abs(a - b) for a in counts for b in counts)
    assert load.gini(torch.tensor(counts)).item() == pytest.approx(pairs / (2 * len(counts) * sum(counts)), abs=1e-12)


def test_full_entropy_and_what_a_token_tells_about_its_expert():
    probs_NE = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.5, 0.15, 0.3, 0.05], [0.1, 0.2, 0.3, 0.4], [0.3, 0.4, 0.1, 0.2]])
    entropy_N = full_entropy(probs_NE.double())
    assert entropy_N.mean().item() == pytest.approx(1.245421, abs=1e-6)
    mean_E = probs_NE.double().mean(0)
    assert full_entropy(mean_E).item() == pytest.approx(1.365865, abs=1e-6)
    assert mutual_information(mean_E, entropy_N.mean()).item() == pytest.approx(0.120444, abs=1e-6)


def test_overlap_of_choices_counts_shared_experts_in_any_order():
    assert choice_overlap(EXPERTS_NK, EXPERTS_NK.flip(1), 4).tolist() == [1, 1, 1, 1]
    assert choice_overlap(EXPERTS_NK, EXPERTS_NK.roll(1, 0), 4).tolist() == [1, 0.5, 0.5, 0]


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
    assert perplexity(3 * math.log(7), 3) == pytest.approx(7)
    assert bits_per_byte(8 * math.log(2), 4) == pytest.approx(2)
    assert perplexity(1e6, 1) == math.inf


@pytest.mark.parametrize("measure", [load.max_vio, load.gini, load.squared_variation, load.load_entropy])
def test_a_load_of_no_token_counts_as_even(measure):
    """A ragged choice can leave a layer without any."""
    nothing, even = torch.zeros(2, 4, dtype=torch.int64), torch.full((2, 4), 3)
    assert measure(nothing).tolist() == measure(even).tolist()
    assert load.overload(nothing, 2).tolist() == [1, 1]
