"""Tokens to the baseline's final loss: worked examples, seeds that never reach it, and the table."""

import json
from math import exp, log

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from simbal.report import sections
from simbal.report.collect import collect
from simbal.report.notes import notes
from simbal.report.render import as_json, tidy_rows
from simbal.report.table import build
from simbal.report.tokens_to_loss import final_slope, first_reach, saved_by_slope, tokens_to_loss

BASELINE = [(0, 9.0), (50, 4.0), (100, 3.0)]
METHOD = [(0, 9.0), (40, 3.2), (60, 3.1), (80, 2.9), (100, 2.8)]
CURVES = st.lists(st.floats(0, 10), min_size=1, max_size=9).map(lambda values: [*zip(range(0, 900, 100), values)])  # noqa: B905


def write_curve(path, points):
    lines = [json.dumps({"step": tokens // 10, "tokens": tokens, "val/loss": loss}) for tokens, loss in points]
    train = '{"step": 1, "tokens": 10, "train/loss": 9.5}'
    (path / "metrics.jsonl").write_text("\n".join([train, *lines]) + "\n")


@pytest.fixture
def compared(write_run):
    """simbal needs 70, 80 and 60% of lbl's tokens on seeds 0 to 2."""
    for seed, shift in ((0, 0), (1, 10), (2, -10)):
        write_curve(write_run("lbl", seed), BASELINE)
        path = write_run("simbal", seed)
        write_curve(path, [(0, 9.0), *((tokens + shift, loss) for tokens, loss in METHOD[1:])])
    return path.parent


def test_the_papers_formula_worked_by_hand():
    """PAPER 3.4: the baseline ends at 3.0 after 100 tokens; 3.2 @ 40, 3.1 @ 60 and 2.9 @ 80 cross it at 70."""
    assert first_reach(METHOD, 3.0) == pytest.approx(70)
    found = tokens_to_loss({0: METHOD}, {0: BASELINE})
    assert (found.saving, found.low, found.validations) == (pytest.approx(0.3), None, 3)
    assert found.shares == {0: pytest.approx(0.7)}


def test_savings_are_averaged_over_shared_seeds_with_students_interval():
    shifted = {seed: [(0, 9.0), (60 + 10 * seed, 3.0)] for seed in range(4)}
    found = tokens_to_loss(shifted, dict.fromkeys(range(3), BASELINE))
    assert found.saving == pytest.approx(0.3)
    half = 4.302652730 * 0.1 / 3**0.5  # savings of 0.4, 0.3 and 0.2
    assert (found.low, found.high) == pytest.approx((0.3 - half, 0.3 + half))


def test_seeds_without_both_curves_do_not_count():
    assert tokens_to_loss({0: METHOD, 1: []}, {0: [], 1: BASELINE}) is None
    assert tokens_to_loss({0: METHOD}, {0: [(0, 9.0)]}) is None
    assert tokens_to_loss({0: [(0, 2.0)]}, {0: BASELINE}) is None


def logarithmic(offset, slope=-0.5):
    """A loss that falls by 0.5 nats with each factor e of tokens."""
    return [(tokens, 9.0 + offset + slope * log(tokens)) for tokens in (100, 200, 400, 800, 1600)]


@given(st.floats(-0.5, 0.5))
def test_a_constant_offset_of_the_loss_has_a_known_saving_by_slope(offset):
    """L(t) = 9 - 0.5 ln t - offset reaches the baseline's end at t = 1600 exp(-2 offset)."""
    found = saved_by_slope({0: logarithmic(-offset)}, {0: logarithmic(0)})
    assert found.shares[0] == pytest.approx(1 - exp(-2 * offset))
    back = saved_by_slope({0: logarithmic(0)}, {0: logarithmic(-offset)})
    assert back.mean == pytest.approx(-found.mean)


@given(st.floats(0.2, 5))
def test_longer_training_on_the_same_curve_saves_nothing_by_slope(times):
    treatment = [(times * tokens, loss - 0.5 * log(times)) for tokens, loss in logarithmic(0)]
    assert saved_by_slope({0: treatment}, {0: logarithmic(0)}).mean == pytest.approx(0, abs=1e-9)


def test_equal_savings_on_every_seed_have_no_interval():
    curves = {seed: logarithmic(0.1 * seed) for seed in range(3)}
    found = tokens_to_loss(curves, curves)
    assert (found.saving, found.low, found.high) == (0, None, None)
    assert (found.by_slope.low, found.by_slope.high) == (None, None)


def test_the_slope_is_scipys_line_through_the_last_half_of_the_tokens():
    curve = [(0, 11.0), (10, 8.0), (20, 7.0), (300, 4.4), (500, 4.0), (600, 3.9), (800, 3.75), (1000, 3.7)]
    last = [(tokens, loss) for tokens, loss in curve if tokens >= 500]
    theirs = scipy.stats.linregress(*zip(*[(log(tokens), loss) for tokens, loss in last], strict=True))
    assert len(last) == 4
    assert final_slope(curve) == pytest.approx(theirs.slope)
    assert final_slope(curve[:-3]) == final_slope(curve[2:-3])  # two are in the last half: the last three are taken


def test_the_interval_by_slope_is_students_over_seeds():
    offsets = {0: 0.05, 1: 0.1, 2: 0.12}
    found = saved_by_slope({s: logarithmic(-x) for s, x in offsets.items()}, dict.fromkeys(offsets, logarithmic(0)))
    bounds = scipy.stats.ttest_1samp([x / 0.5 for x in offsets.values()], 0).confidence_interval()
    assert (found.low, found.high) == pytest.approx((bounds.low, bounds.high))
    assert found.shares[1:] == pytest.approx((1 - exp(-bounds.low), 1 - exp(-bounds.high)))


@pytest.mark.parametrize("curve", [logarithmic(0, slope=0.5), logarithmic(0)[:2], [(0, 9.0), (5, 8.0), (9, 7.0)]])
def test_a_curve_that_does_not_fall_or_is_too_short_has_no_saving_by_slope(curve):
    assert saved_by_slope({0: logarithmic(0), 1: curve}, {0: logarithmic(0), 1: curve}) is None


def test_the_saving_by_slope_is_written_and_compared_with_the_papers_in_the_notes(write_run):
    for seed in range(3):
        write_curve(write_run("lbl", seed), logarithmic(0))
        write_curve(write_run("simbal", seed), logarithmic(-0.22 - 0.01 * seed))
        path = write_run("lf", seed)
        write_curve(path, logarithmic(-0.05 - 0.01 * seed))  # not the paper's comparison
    table = build("t", collect(path.parent))
    found = " ".join(notes(table))
    assert "includes the paper's 36% for simbal." in found
    assert "for lf." not in found
    lines = [line for line in tidy_rows(table) if line["metric"] == "tokens_saved_by_slope"]
    assert {line["balancing"]: (line["mean"], line["scale"]) for line in lines} == {
        "simbal": (pytest.approx(2 * 0.23), "ln"), "lf": (pytest.approx(2 * 0.06), "ln"),
    }  # fmt: skip
    assert f"{1 - exp(-2 * 0.23):+.1%}" in sections.tokens_to_loss(table).lines[1]


@given(CURVES, st.floats(0, 10), st.floats(0, 10))
def test_a_lower_loss_is_reached_no_sooner_and_only_if_the_curve_falls_so_low(points, one, other):
    low, high = (first_reach(points, loss) for loss in sorted((one, other)))
    assert (low is None) == (min(loss for _, loss in points) > min(one, other))
    if low is not None:
        assert high <= low


def test_the_table_and_the_files_have_the_saving_and_the_seeds(compared):
    table = build("t", collect(compared))
    cells = ["simbal", "70.0%", "+30.0%", "+5.2% to +54.8%", "in none", "—", "—", "3"]
    assert sections.tokens_to_loss(table).lines == [cells]
    assert any("3 validations" in note and "trainer.val_every" in note for note in notes(table))
    (line,) = [line for line in tidy_rows(table) if line["metric"] == "tokens_saved"]
    assert (line["mean"], line["seeds"], line["missed"]) == (pytest.approx(0.3), "0 1 2", "")
    baseline, treatment = as_json(table)["arms"]
    assert baseline["tokens_to_loss"] is None
    assert treatment["tokens_to_loss"]["shares"] == pytest.approx({0: 0.7, 1: 0.8, 2: 0.6})


def test_a_seed_that_never_reaches_the_loss_is_named_and_leaves_no_mean(compared):
    write_curve(next(compared.glob("simbal-*seed1-*")), BASELINE[:2])
    table = build("t", collect(compared))
    assert sections.tokens_to_loss(table).lines == [["simbal", "—", "—", "—", "in 1 of 3 seeds", "—", "—", "3"]]
    assert any("simbal (seed=1) did not reach" in note for note in notes(table))
