"""Curves are means over seeds with bands; PES is read per layer, loads per expert."""

import pytest
import scipy.stats

from simbal.report import curves
from simbal.report.curves import expert_loads
from simbal.report.report import read_table
from tests.report.page.conftest import STEPS, row, write_rows


@pytest.fixture
def arms(sweep):
    return lambda: curves.read_arms([row.arm for row in read_table(sweep).rows], "lbl")


def test_a_curve_is_the_mean_over_seeds_with_their_standard_deviation(write_run, arms):
    for seed in (0, 2):
        write_run(seed=seed)
    (curve,) = curves.metric_curves(arms(), "val/loss")
    assert curve.xs == [0, 100, 200, 300, 400]
    assert curve.means == [9, 8, 7, 6, 5]
    assert curve.bands == pytest.approx([2**0.5] * 5)
    (half,) = curves.second_half(arms(), "val/loss")
    assert (half.xs, half.means, half.bands) == ([200, 300, 400], curve.means[2:], curve.bands[2:])


def losses(path, *values):
    write_rows(path, [{"step": step, "tokens": 10 * step, "val/loss": loss} for step, loss in enumerate(values)])


def test_a_band_of_arms_with_the_same_seeds_is_the_interval_of_their_paired_difference(write_run, arms):
    """Seeds that are 5 nats apart in both arms say nothing of the distance between the two."""
    for seed, difference in enumerate((0.1, 0.4, 0.1)):
        losses(write_run("lbl", seed), 9 + 5 * seed, 8 + 5 * seed)
        losses(write_run("simbal", seed), 9 + 5 * seed, 8 + 5 * seed + difference)
        losses(write_run("none", seed + 1), 9, 8 + seed)
    found = {curve.arm: curve for curve in curves.metric_curves(arms(), "val/loss")}
    low, high = scipy.stats.ttest_1samp([0.1, 0.4, 0.1], 0).confidence_interval()
    assert found["simbal"].bands == pytest.approx([0, (high - low) / 2])
    assert (found["simbal"].rival, found["none"].rival) == ("lbl", None)
    assert found["lbl"].bands is None  # its difference to itself is 0
    assert found["none"].bands == pytest.approx([0, 1])  # other seeds
    text = curves.describe_bands([*found.values()])
    assert "interval of the paired difference from lbl; none: ± one standard deviation" in text


def test_curves_are_means_over_the_steps_that_all_seeds_have(write_run, arms):
    write_run(seed=0)
    write_rows(write_run(seed=1), [row(step, 1, False) for step in STEPS if step != 20])
    assert curves.metric_curves(arms(), "val/loss")[0].xs == [0, 100, 300, 400]
    (curve,) = curves.training_loss(arms())
    assert (curve.xs, curve.means) == ([100, 300, 400], [8.5, 6.5, 5.5])


def test_one_seed_has_no_band_and_pes_has_a_curve_per_layer_with_a_rate_per_million_tokens(write_run, arms):
    write_run()
    assert curves.metric_curves(arms(), "val/loss")[0].bands is None
    (first,), (second,) = curves.pes_by_layer(arms())
    assert (first.means, second.means) == ([0.1] * 5, [0.3] * 5)
    (rate,) = curves.rate_curves(arms(), "val/mean_pes")
    assert rate.xs == [50, 150, 250, 350]
    assert rate.means == pytest.approx([0.01 / 100 * 1e6] * 4)


def test_loads_are_from_the_first_run_in_order_of_experts_relative_to_the_even_load(write_run, arms):
    for seed in (1, 0):
        write_run(seed=seed)
    assert expert_loads(arms()) == {"simbal": [[0.4, 0.8, 1.2, 1.6], [0, 0, 2, 2]]}


def test_the_training_loss_is_averaged_over_complete_intervals_of_steps(write_run, arms):
    rows = [
        {"step": step, "tokens": 10 * step, "train/ce": loss}
        for step, loss in ((0, 99.0), (1, 9.0), (2, 7.0), (3, 6.0), (4, 4.0), (5, 1.0))
    ]
    write_rows(write_run(), [*rows, {"step": 400, "tokens": 4000, "val/loss": 1.0}])
    (curve,) = curves.training_loss(arms())
    assert [*zip(curve.xs, curve.means, strict=True)] == [(20, 8.0), (40, 5.0)]  # two steps each


def test_dropping_and_pruning_are_read_from_the_analyses(write_run, analyze, arms):
    analyze(write_run())
    (dropping,), (pruning,) = (curves.analysis_curves(arms(), name) for name in ("dropping", "pruning"))
    assert (dropping.xs, dropping.means) == ([0, 1, 2], [50, 60, 70])
    assert (pruning.xs, pruning.means) == ([0, 0.1], [50, 50])
