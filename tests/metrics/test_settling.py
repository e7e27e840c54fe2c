"""The numbers of a curve of MaxVio: how uneven the worst steps of the second half are, and since when it is so even."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simbal.metrics.routing import FEWEST, NEAR, WINDOW, steps_to_settle, tail
from simbal.training.run import train


def curve(values):
    return [(10 * (place + 1), value) for place, value in enumerate(values)]


def test_the_tail_is_of_the_second_half_alone():
    assert tail(curve([9.0] * 21 + [*range(21)])) == pytest.approx(19.0)
    assert tail(curve([1.0] * (FEWEST - 1))) is None


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([1.0] * 20, 10),
        ([4.0] * 6 + [1.0] * 14, 50),  # three of the five from there on are even
        ([1.0] * 6 + [4.0, 4.0] + [1.0] * 12, 10),  # two uneven steps are no median
        ([1.0] * 6 + [4.0] * 3 + [1.0] * 11, 80),
        ([2.0**value for value in range(20)], None),  # less and less even
        ([1.0] * 9, None),
    ],
)
def test_it_has_settled_from_the_first_step_on_whose_medians_stay_near_those_of_the_second_half(values, step):
    assert steps_to_settle(curve(values)) == step


@given(st.lists(st.floats(0, 100), min_size=FEWEST, max_size=60))
def test_no_median_after_it_is_uneven_and_the_one_before_it_is(values):
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


def test_a_run_has_them_in_its_record(small_spec):
    spec = small_spec("trainer.log_every=1")
    train(spec)
    rows = [json.loads(line) for line in (spec.path / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row["train/max_vio"]) for row in rows if "train/max_vio" in row]
    record = json.loads((spec.path / "record.json").read_text())
    assert len(found) == 12
    assert record["metrics"]["train/max_vio_tail"] == tail(found)
    assert record["metrics"].get("train/steps_to_settle") == steps_to_settle(found)
    assert "95th percentile" in record["definitions"]["train/max_vio_tail"]
