"""Metrics of routing and load match hand calculation, and so do the tail and settling time of MaxVio."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.metrics import routing as load
from simbal.metrics.definitions import bits_per_byte, perplexity
from simbal.metrics.routing import (
    FEWEST,
    NEAR,
    WINDOW,
    choice_overlap,
    full_entropy,
    mutual_information,
    sequence_expert_use,
    steps_to_settle,
    tail,
    topk_entropy,
)
from simbal.metrics.similarity import identity_deviation, mean_squared_deviation
from simbal.training.run import train

EXPERTS_NK = torch.tensor([[0, 1], [0, 2], [3, 2], [1, 0]])
WEIGHTS_NK = torch.tensor([[0.4, 0.3], [0.5, 0.3], [0.4, 0.3], [0.4, 0.3]]).double()


def test_sequence_expert_use_counts_distinct_experts_of_each_sequence():
    assert sequence_expert_use(EXPERTS_NK, num_sequences=2, num_experts=4).tolist() == [0.75, 1.0]


def test_topk_entropy_renormalizes_the_weights():
    entropy_N = topk_entropy(WEIGHTS_NK)
    assert entropy_N.tolist() == pytest.approx([0.682908, 0.661563, 0.682908, 0.682908], abs=1e-6)
    assert entropy_N.mean().item() == pytest.approx(0.677572, abs=1e-6)


def test_overload_is_the_load_of_the_busiest_group_divided_by_the_mean():
    counts_LE = torch.tensor([[4, 3, 1, 0], [2, 2, 2, 2], [0, 0, 0, 8]])
    assert load.overload(counts_LE, 2).tolist() == [1.75, 1, 2]
    assert load.overload(counts_LE, 4).tolist() == [2, 1, 4]
    assert load.overload(counts_LE, 4).tolist() == (load.max_vio(counts_LE) + 1).tolist()
    assert load.overload(counts_LE, 1).tolist() == [1, 1, 1]


def test_chosen_experts_ignores_empty_slots():
    assert load.chosen_experts(EXPERTS_NK, 4).int().tolist() == [[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1], [1, 1, 0, 0]]
    assert load.chosen_experts(torch.tensor([[2, 4], [4, 4]]), 4).tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("measure", "some", "balanced", "collapsed"),
    [
        (load.max_vio, 0.5, 0, 3), (load.unique_experts, 4, 4, 1), (load.gini, 0.1875, 0, 3 / 4),
        (load.squared_variation, 0.125, 0, 3), (load.load_entropy, 1.320888, math.log(4), 0),
        (load.dead_experts, 0, 0, 3),
    ],
)  # fmt: skip
def test_measures_of_the_load_of_each_layer_match_hand_calculation(measure, some, balanced, collapsed):
    counts_LE = torch.tensor([[3, 2, 2, 1], [5, 5, 5, 5], [0, 8, 0, 0]])
    assert measure(counts_LE).tolist() == pytest.approx([some, balanced, collapsed], abs=1e-6)


def test_an_expert_is_near_dead_strictly_below_a_tenth_of_the_mean():
    assert load.near_dead_experts(torch.tensor([[0, 9, 10, 381], [10, 10, 190, 190]])).tolist() == [2, 0]


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=9).filter(any))
def test_gini_equals_the_mean_difference_of_pairs(counts):
    pairs = sum(abs(a - b) for a in counts for b in counts)
    assert load.gini(torch.tensor(counts)).item() == pytest.approx(pairs / (2 * len(counts) * sum(counts)), abs=1e-12)


def test_full_entropy_and_mutual_information():
    probs_NE = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.5, 0.15, 0.3, 0.05], [0.1, 0.2, 0.3, 0.4], [0.3, 0.4, 0.1, 0.2]])
    entropy_N = full_entropy(probs_NE.double())
    assert entropy_N.mean().item() == pytest.approx(1.245421, abs=1e-6)
    mean_E = probs_NE.double().mean(0)
    assert full_entropy(mean_E).item() == pytest.approx(1.365865, abs=1e-6)
    assert mutual_information(mean_E, entropy_N.mean()).item() == pytest.approx(0.120444, abs=1e-6)


def test_choice_overlap_counts_common_experts_in_any_order():
    assert choice_overlap(EXPERTS_NK, EXPERTS_NK.flip(1), 4).tolist() == [1, 1, 1, 1]
    assert choice_overlap(EXPERTS_NK, EXPERTS_NK.roll(1, 0), 4).tolist() == [1, 0.5, 0.5, 0]


def test_squared_deviation_of_a_small_router():
    weight_ED = torch.tensor([[1, 0.5, 0], [0, 1, -0.5]])
    assert mean_squared_deviation(weight_ED, torch.float32).item() == pytest.approx(0.15625)


@pytest.mark.parametrize(("entry", "quanta"), [(0.99609375, 1), (1.0078125, 4)])
def test_one_diagonal_entry_one_bf16_step_below_1_gives_the_papers_quantum(entry, quanta):
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
def test_a_load_of_0_tokens_counts_as_balanced(measure):
    nothing, even = torch.zeros(2, 4, dtype=torch.int64), torch.full((2, 4), 3)
    assert measure(nothing).tolist() == measure(even).tolist()
    assert load.overload(nothing, 2).tolist() == [1, 1]


def curve(values):
    return [(10 * (place + 1), value) for place, value in enumerate(values)]


def test_the_tail_uses_only_the_second_half():
    assert tail(curve([9.0] * 21 + [*range(21)])) == pytest.approx(19.0)
    assert tail(curve([1.0] * (FEWEST - 1))) is None


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([1.0] * 20, 10),
        ([4.0] * 6 + [1.0] * 14, 50),  # three of the next five points are low
        ([1.0] * 6 + [4.0, 4.0] + [1.0] * 12, 10),  # two high points do not change a median of five
        ([1.0] * 6 + [4.0] * 3 + [1.0] * 11, 80),
        ([2.0**value for value in range(20)], None),  # rises until the end
        ([1.0] * 9, None),
    ],
)
def test_settling_is_the_first_step_after_which_all_medians_stay_near_the_final_one(values, step):
    assert steps_to_settle(curve(values)) == step


@given(st.lists(st.floats(0, 100), min_size=FEWEST, max_size=60))
def test_all_medians_after_settling_are_within_the_bound_and_the_one_before_is_not(values):
    settled = steps_to_settle(curve(values))
    half = sorted(values[len(values) // 2 :])
    bound = NEAR * (half[(len(half) - 1) // 2] + half[len(half) // 2]) / 2
    medians = [sorted(values[first : first + WINDOW])[WINDOW // 2] for first in range(len(values) - WINDOW + 1)]
    if settled is None:
        assert medians[-1] > bound
    else:
        place = settled // 10 - 1
        assert all(value <= bound for value in medians[place:])
        assert not place or medians[place - 1] > bound


def test_a_run_records_tail_and_settling(small_spec):
    spec = small_spec("trainer.log_every=1")
    train(spec)
    rows = [json.loads(line) for line in (spec.path / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row["train/max_vio"]) for row in rows if "train/max_vio" in row]
    record = json.loads((spec.path / "record.json").read_text())
    assert len(found) == 12
    assert record["metrics"]["train/max_vio_tail"] == tail(found)
    assert record["metrics"].get("train/steps_to_settle") == steps_to_settle(found)
    assert "95th percentile" in record["definitions"]["train/max_vio_tail"]
