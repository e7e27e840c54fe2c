"""Simultaneous intervals equal published values, scipy's tests and plain least squares."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from simbal.report.largest_t import LargestT
from simbal.report.simultaneous import (
    Interval,
    equivalence_power,
    seeds_to_equate,
    seeds_to_resolve,
    simultaneous_intervals,
)

SEEDS = st.integers(0, 2**32 - 1)


def cells_of(values_AS):
    """Cells of arms a0, a1, ... with seeds 0, 1, ..."""
    return {f"a{arm}": dict(enumerate(row)) for arm, row in enumerate(np.asarray(values_AS).tolist())}


def random_cells(seed, arms, seeds, sds=1.0):
    rng = np.random.default_rng(seed)
    noise_AS = rng.standard_normal((arms, seeds)) * np.broadcast_to(sds, arms)[:, None]
    return cells_of(noise_AS + 5 * rng.standard_normal((arms, 1)) + 9 * rng.standard_normal(seeds))


def against_first(cells):
    """Every arm with the first."""
    first, *others = cells
    return [(arm, first) for arm in others]


def ends(interval):
    return interval.mean - interval.half, interval.mean + interval.half


@pytest.mark.parametrize(
    ("comparisons", "degrees", "value"),
    [(2, 10, 2.568), (3, 10, 2.759), (9, 10, 3.244), (9, 20, 2.946), (3, 120, 2.379), (39, 156, 3.117), (4, 25, 2.607)],
)
def test_critical_values_equal_dunnetts(comparisons, degrees, value):
    assert LargestT(comparisons).quantile(degrees) == pytest.approx(value, abs=5e-4)


@pytest.mark.parametrize(("arms", "degrees"), [(2, 3), (5, 16), (40, 156)])
def test_critical_values_for_all_pairs_equal_scipys_studentized_range(arms, degrees):
    theirs = scipy.stats.studentized_range.ppf(0.95, arms, degrees) / math.sqrt(2)
    assert LargestT(arms, "pairs").quantile(degrees) == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("kind", ["baseline", "separate"])
@pytest.mark.parametrize("degrees", [1, 4, 30])
def test_the_critical_value_of_one_comparison_is_students(kind, degrees):
    largest = LargestT(1, kind)
    assert largest.quantile(degrees) == pytest.approx(scipy.stats.t.ppf(0.975, degrees), rel=1e-6)
    assert largest.quantile(degrees, 0.001) == pytest.approx(scipy.stats.t.ppf(0.9995, degrees), rel=1e-5)


def test_uncorrelated_comparisons_are_wider_than_correlated_ones_and_narrower_than_sidaks():
    correlated, uncorrelated = (LargestT(9, correlation=one).quantile(12) for one in (0.5, 0.0))
    assert correlated < uncorrelated < LargestT(9, "separate").quantile(12)


@given(SEEDS, st.integers(2, 9))
def test_two_arms_have_students_paired_interval(seed, seeds):
    cells = random_cells(seed, 2, seeds)
    (found,) = simultaneous_intervals(cells, [("a1", "a0")]).values()
    theirs = scipy.stats.ttest_rel([*cells["a1"].values()], [*cells["a0"].values()])
    assert ends(found) == pytest.approx([*theirs.confidence_interval()], rel=1e-6, abs=1e-9)
    assert found.p == pytest.approx(theirs.pvalue, abs=1e-7)


@settings(max_examples=30)
@given(SEEDS, st.integers(3, 7), st.integers(2, 6), st.integers(0, 3))
def test_means_and_errors_equal_a_regression_on_arm_and_seed(seed, arms, seeds, missing):
    cells = random_cells(seed, arms, seeds)
    rng = np.random.default_rng(seed)
    for arm in rng.choice([*cells][1:], missing):
        if len(cells[arm]) > 2:
            cells[arm].pop(int(rng.choice([*cells[arm]])))
    found = simultaneous_intervals(cells, against_first(cells))
    rows = [(arm, one, value) for arm, values in cells.items() for one, value in values.items()]
    columns = [[1.0] * len(rows)]  # the first arm and the first seed are the reference
    columns += [[arm == name for arm, *_ in rows] for name in [*cells][1:]]
    columns += [[one == other for _, one, _ in rows] for other in range(1, seeds)]
    dummies = np.array(columns, dtype=float).T
    values = np.array([value for *_, value in rows])
    effects, *_ = np.linalg.lstsq(dummies, values, rcond=None)
    degrees = len(values) - np.linalg.matrix_rank(dummies)
    variance = np.sum((values - dummies @ effects) ** 2) / degrees
    errors = np.sqrt(variance * np.diag(np.linalg.inv(dummies.T @ dummies)))
    for place, arm in enumerate([*cells][1:], 1):
        interval = found.get((arm, "a0"))
        if arms == 3 and len(found) == 2 and all(one.pooled for one in found.values()):  # no arm is set aside
            assert interval.degrees == degrees
        if interval and interval.pooled and interval.degrees == degrees:
            assert (interval.mean, interval.error) == pytest.approx((effects[place], errors[place]), rel=1e-6)


@given(SEEDS, st.integers(2, 6), st.integers(2, 5), st.booleans())
def test_an_interval_excludes_zero_if_and_only_if_p_is_below_5_percent(seed, arms, seeds, every_pair):
    cells = random_cells(seed, arms, seeds)
    names = [*cells]
    pairs = [(one, other) for place, one in enumerate(names) for other in names[:place]]
    for found in simultaneous_intervals(cells, pairs if every_pair else against_first(cells), every_pair).values():
        assert (found.half < abs(found.mean)) == (found.p < 0.05)
        assert found.detectable > found.half


@given(SEEDS, st.floats(-100, 100))
def test_seed_effects_and_the_order_of_arms_do_not_matter(seed, shift):
    cells = random_cells(seed, 5, 4)
    shifted = {
        arm: {one: value + shift * one for one, value in values.items()} for arm, values in reversed(cells.items())
    }
    pairs = against_first(cells)
    ours, theirs = (simultaneous_intervals(one, pairs) for one in (cells, shifted))
    assert [ends(ours[pair]) for pair in pairs] == [pytest.approx(ends(theirs[pair]), abs=1e-6) for pair in pairs]


def test_a_noisy_arm_keeps_its_own_interval_and_does_not_widen_the_others():
    cells = random_cells(0, 6, 6)
    noisy = cells | {"a3": {seed: value + 30 * (-1) ** seed for seed, value in cells["a3"].items()}}
    pairs = against_first(cells)
    quiet, found = (simultaneous_intervals(one, pairs) for one in (cells, noisy))
    assert [pair[0] for pair in pairs if not found[pair].pooled] == ["a3"]
    assert found["a1", "a0"].half < 1.5 * quiet["a1", "a0"].half
    theirs = scipy.stats.ttest_rel([*noisy["a3"].values()], [*noisy["a0"].values()])
    level = 0.95 ** (1 / 5)
    assert ends(found["a3", "a0"]) == pytest.approx([*theirs.confidence_interval(level)], rel=1e-6)


def test_arms_without_a_common_noise_all_keep_their_own_intervals():
    cells = random_cells(1, 9, 6, [1, 1, 1, 1, 1, 1, 90, 900, 9000])
    assert not any(found.pooled for found in simultaneous_intervals(cells, against_first(cells)).values())


@given(SEEDS, st.floats(-100, 100))
def test_arms_that_vary_together_leave_all_noise_to_the_other_arm_whatever_the_rounding(seed, shift):
    noise_S = np.random.default_rng(seed).standard_normal(5)
    cells = cells_of([np.full(5, shift), shift + 1 + noise_S, shift + 2 + noise_S])
    found = simultaneous_intervals(cells, against_first(cells))
    assert [interval.pooled for interval in found.values()] == [False, False]


def test_a_noisy_baseline_widens_all_intervals():
    cells = random_cells(5, 8, 6)
    noisy = cells | {"a0": {seed: value + 5 * (-1) ** seed for seed, value in cells["a0"].items()}}
    quiet, found = (simultaneous_intervals(one, against_first(cells)) for one in (cells, noisy))
    for pair, interval in found.items():
        assert interval.pooled
        assert interval.half > 2 * quiet[pair].half
        assert interval.degrees < quiet[pair].degrees


def two_groups(small, large):
    """Cells and comparisons of two groups, each with its own baseline."""
    cells = small | {f"{arm} large": values for arm, values in large.items()}
    return cells, [*against_first(small), *((f"{arm} large", f"{other} large") for arm, other in against_first(large))]


@given(SEEDS, st.floats(0.1, 10))
def test_groups_of_arms_have_their_own_noise_and_hold_together(seed, ratio):
    small, large = random_cells(seed, 4, 5), random_cells(seed + 1, 2, 5, ratio)
    found = simultaneous_intervals(*two_groups(small, large))
    for group, suffix, comparisons in ((small, "", 3), (large, " large", 1)):
        alone = simultaneous_intervals(group, against_first(group), alpha=1 - 0.95 ** (comparisons / 4))
        for (arm, other), interval in alone.items():
            assert ends(found[arm + suffix, other + suffix]) == pytest.approx(ends(interval), rel=1e-6)


def test_a_group_without_noise_has_no_intervals_and_does_not_narrow_the_others():
    noisy, constant = random_cells(3, 3, 5), cells_of([[1.0] * 5, [2.0] * 5])
    found = simultaneous_intervals(*two_groups(noisy, constant))
    alone = simultaneous_intervals(noisy, against_first(noisy), alpha=1 - 0.95 ** (2 / 3))
    assert found.keys() == alone.keys()
    assert all(ends(found[pair]) == pytest.approx(ends(alone[pair]), rel=1e-6) for pair in alone)


def test_pairs_without_two_shared_seeds_or_without_noise_have_no_interval():
    cells = {"a0": {0: 1.0, 1: 2.0}, "a1": {1: 3.0, 2: 3.0}, "a2": {0: 2.0, 1: 3.0}}
    assert simultaneous_intervals(cells, against_first(cells)) == {}


@pytest.mark.parametrize("largest", [LargestT(1), LargestT(4), LargestT(5, "pairs"), LargestT(4, "separate")])
def test_the_seeds_to_resolve_and_to_equate_are_the_fewest(largest):
    def with_seeds(seeds):
        return Interval(0.0, 0.02 * math.sqrt(2 / seeds), 4 * (seeds - 1), largest, 0.05)

    resolve, equate = (count(with_seeds(5), 5, 0.015) for count in (seeds_to_resolve, seeds_to_equate))
    assert with_seeds(resolve).detectable <= 0.015 < with_seeds(resolve - 1).detectable
    assert equivalence_power(with_seeds(equate), 0.015) >= 0.8 > equivalence_power(with_seeds(equate - 1), 0.015)


def test_the_detectable_difference_has_80_percent_power_by_scipys_noncentral_t():
    found = Interval(0.0, 0.1, 12, LargestT(1), 0.05)
    assert scipy.stats.nct.sf(scipy.stats.t.ppf(0.975, 12), 12, found.detectable / 0.1) == pytest.approx(0.8, abs=1e-6)


def test_the_power_of_equivalence_equals_powertost():
    """The manual of the R package PowerTOST: a crossover of 40, CV 30%, true ratio 0.95, 80 to 125%: 0.815845."""
    error = math.sqrt(math.log(1 + 0.3**2) * 2 / 40)
    ninety_percent = Interval(0.0, error, 38, LargestT(1, "separate"), 0.1)
    assert equivalence_power(ninety_percent, math.log(1.25), math.log(0.95)) == pytest.approx(0.815845, abs=1e-5)


def test_an_interval_wider_than_the_margin_shows_equivalence_with_a_small_probability():
    assert 0 < equivalence_power(Interval(0.0, 1.0, 4, LargestT(1), 0.05), 1.0) < 0.05
