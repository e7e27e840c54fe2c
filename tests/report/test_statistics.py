"""Statistics equal scipy's, published values and worked examples; missing noise gives None, never NaN."""

import math
from dataclasses import astuple
from statistics import fmean, stdev

import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given
from hypothesis import strategies as st

from simbal.report.statistics import (
    Summary,
    conclusion_word,
    detectable,
    equivalence_p,
    equivalence_power,
    holm,
    interval,
    noncentrality,
    paired_difference,
    pairs_to_equate,
    pairs_to_resolve,
    relative,
    student_quantile,
    summarize,
    welch_test,
    with_power,
)

APART = st.lists(st.integers(-1000, 1000), min_size=2, max_size=9).filter(lambda values: len(set(values)) > 1)
P_VALUES = st.lists(st.floats(0, 1), max_size=9)


def paired(differences):
    return paired_difference(dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0))


def test_mean_and_standard_deviation_of_a_worked_example():
    assert summarize([1.0, 2.0, 3.0, 4.0, 5.0]) == Summary(3.0, math.sqrt(2.5), 5)
    assert summarize([7.0]) == Summary(7.0, None, 1)
    assert summarize([]) is None


def test_a_paired_difference_worked_by_hand():
    difference = paired([1, 2, 3, 4, 5])
    half = 2.776445105 * math.sqrt(0.5)  # t(0.975, 4 degrees of freedom) * sqrt(2.5 / 5)
    assert (difference.mean, difference.pairs) == (3.0, 5)
    assert (difference.low, difference.high) == pytest.approx((3 - half, 3 + half))
    assert difference.effect == pytest.approx(3 / math.sqrt(2.5))
    # t = 3 / sqrt(0.5) with 4 degrees of freedom, whose distribution has a closed form
    x = math.atan(3 / math.sqrt(0.5) / 2)
    assert difference.p == pytest.approx(1 - math.sin(x) * (1 + math.cos(x) ** 2 / 2))


@given(APART, st.data())
def test_interval_and_p_equal_scipys_paired_t_test(pairs, data):
    baseline = data.draw(st.lists(st.integers(-1000, 1000), min_size=len(pairs), max_size=len(pairs)))
    treatment = [value + difference for value, difference in zip(baseline, pairs, strict=True)]
    found = paired_difference(dict(enumerate(treatment)), dict(enumerate(baseline)))
    theirs = scipy.stats.ttest_rel(treatment, baseline)
    bounds = theirs.confidence_interval()
    assert (found.p, found.low, found.high) == pytest.approx((theirs.pvalue, bounds.low, bounds.high), rel=1e-6)
    assert found.effect == pytest.approx(fmean(pairs) / stdev(pairs))


def test_only_shared_seeds_are_paired_while_welch_uses_all():
    found = paired_difference({0: 1.0, 1: 2.0, 2: 9.0}, {0: 5.0, 5: 6.0})
    assert (found.mean, found.pairs, found.low, found.p) == (-4.0, 1, None, None)
    assert found.welch == welch_test([1.0, 2.0, 9.0], [5.0, 6.0])
    assert paired_difference({0: 1.0, 1: 2.0}, {0: 5.0}).welch is None
    assert paired_difference({0: 1.0}, {1: 5.0}) is None


@given(APART, APART)
def test_welch_is_scipys_test_of_unequal_variances(treatment, baseline):
    found, theirs = welch_test(treatment, baseline), scipy.stats.ttest_ind(treatment, baseline, equal_var=False)
    assert (found.p, found.degrees_of_freedom) == pytest.approx((theirs.pvalue, theirs.df), rel=1e-6)
    assert found.mean == pytest.approx(fmean(treatment) - fmean(baseline))


def test_the_papers_welch_test_follows_from_its_means_and_deviations():
    """14.051 sd 0.026 and 13.691 sd 0.039 of five models each: df 6.96907, p 5.83e-7, interval [0.31039, 0.40961]."""
    spread = [step / math.sqrt(2.5) for step in (-2, -1, 0, 1, 2)]  # standard deviation 1
    found = welch_test([14.051 + 0.026 * z for z in spread], [13.691 + 0.039 * z for z in spread])
    assert (found.mean, found.degrees_of_freedom, found.p) == pytest.approx((0.36, 6.96907, 5.83e-7), rel=1e-3)
    half = student_quantile(0.975, 6.96907) * 0.0209619
    assert (0.360 - half, 0.360 + half) == pytest.approx((0.31039, 0.40961), abs=1e-5)


@pytest.mark.parametrize("ratio", [False, True])
@pytest.mark.parametrize("change", [0.0, 0.1])
def test_without_noise_there_is_neither_interval_nor_test(change, ratio):
    baseline = {0: 1.1, 1: 2.2, 2: 3.3}  # 2.2 + 0.1 - 2.2 is not exactly 0.1: rounding is no noise
    treatment = {seed: value * (1 + change) if ratio else value + change for seed, value in baseline.items()}
    found = paired_difference(treatment, baseline, ratio)
    assert (relative(found.mean) if ratio else found.mean) == pytest.approx(change)
    assert (found.low, found.high, found.p, found.effect) == (None,) * 4
    assert welch_test([2.0 + change] * 2, [2.0] * 3).p is None


def test_a_ratio_is_the_paired_test_of_logarithms_whatever_the_unit():
    treatment, baseline = [14.0, 13.5, 13.9], [14.4, 14.1, 13.8]
    found = paired_difference(dict(enumerate(treatment)), dict(enumerate(baseline)), ratio=True)
    theirs = scipy.stats.ttest_rel(np.log(treatment), np.log(baseline))
    assert (found.p, found.low) == pytest.approx((theirs.pvalue, theirs.confidence_interval().low))
    geometric = scipy.stats.gmean(treatment) / scipy.stats.gmean(baseline)
    assert (found.scale, relative(found.mean)) == ("ln", pytest.approx(geometric - 1))
    scaled = [{seed: 100 * value for seed, value in enumerate(values)} for values in (treatment, baseline)]
    other = paired_difference(*scaled, ratio=True)
    assert (found.mean, found.p) == pytest.approx((other.mean, other.p))


def test_values_without_a_mean_or_a_logarithm_are_errors():
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match=str(wrong)):
            summarize([1.0, wrong])
        with pytest.raises(ValueError, match=str(wrong)):
            paired_difference({0: 1.0}, {0: 1.0, 1: wrong}, ratio=True)
    with pytest.raises(ValueError, match="0.0 has no logarithm"):
        paired_difference({0: 1.0}, {0: 0.0}, ratio=True)


@given(st.dictionaries(st.integers(0, 9), st.floats(-1e12, 1e12)), st.dictionaries(st.integers(0, 9), st.floats(-1, 1)))
def test_no_input_gives_nan_or_a_p_above_1(treatment, baseline):
    found = paired_difference(treatment, baseline)
    assume(found)
    numbers = [*astuple(found)[:6], *(astuple(found.welch) if found.welch else ())]
    assert all(math.isfinite(number) for number in numbers if number is not None)
    assert all(0 <= p <= 1 for p in (found.p, found.welch and found.welch.p) if p is not None)


def test_holm_worked_by_hand():
    # sorted 0.005, 0.01, 0.03, 0.04: 4 * 0.005, 3 * 0.01, 2 * 0.03, and 0.04 raised to the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


@given(P_VALUES)
def test_holm_lies_between_p_and_bonferroni_and_keeps_the_order(p_values):
    corrected = holm(p_values)
    for p, larger in zip(p_values, corrected, strict=True):
        assert p <= larger <= min(1, len(p_values) * p)
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    assert [corrected[i] for i in order] == sorted(corrected)


@pytest.mark.parametrize("pairs", [2, 3, 5, 40])
def test_the_detectable_difference_has_80_percent_power_by_scipys_noncentral_t(pairs):
    shift = detectable(0.058, pairs) * math.sqrt(pairs) / 0.058
    assert scipy.stats.nct.sf(scipy.stats.t.ppf(0.975, pairs - 1), pairs - 1, shift) == pytest.approx(0.8, abs=1e-6)


def test_many_pairs_need_what_a_normal_test_needs():
    assert noncentrality(10**6) == pytest.approx(scipy.stats.norm.ppf(0.975) + scipy.stats.norm.ppf(0.8), abs=1e-4)


@given(APART.map(lambda values: [value / 1000 for value in values]), st.floats(0.01, 2))
def test_equivalence_is_two_one_sided_tests_and_the_90_percent_interval_within_the_margin(values, margin):
    summary = summarize(values)
    error = summary.sd / math.sqrt(summary.n)
    found = equivalence_p(summary.mean, error, summary.n - 1, margin)
    low, high = scipy.stats.t.interval(0.9, summary.n - 1, summary.mean, error)
    assert (found < 0.05) == (-margin < low and high < margin)
    one_sided = [
        scipy.stats.ttest_1samp(values, bound, alternative=side).pvalue
        for bound, side in ((-margin, "greater"), (margin, "less"))
    ]
    assert found == pytest.approx(max(one_sided), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("differences", "better", "word"),
    [
        ((-0.05, -0.06, -0.055), "lower", "better"),
        ((-0.05, -0.06, -0.055), "higher", "worse"),
        ((-0.05, -0.06, -0.055), "neither", "lower"),
        ((0.05, 0.06, 0.055), "neither", "higher"),
        ((0.001, -0.002, 0.0015), "lower", "equivalent"),
        ((0.010, 0.011, 0.0105), "lower", "worse"),  # within the margin too: the significant difference is named
        ((-0.2, 0.1, 0.15), "lower", "not resolved"),
        ((0.3,), "lower", "not resolved"),
        ((0.3, 0.3), "lower", "not resolved"),
    ],
)
def test_the_conclusion_worked_by_hand(differences, better, word):
    assert conclusion_word(with_power(paired(differences), 0.026), better) == word


def test_without_a_margin_nothing_is_equivalent():
    assert conclusion_word(with_power(paired((0.001, -0.002, 0.0015)), None), "lower") == "not resolved"


@given(APART)
def test_an_arm_is_better_or_worse_if_the_interval_excludes_zero(values):
    low, high = interval(summarize(values))
    word = conclusion_word(with_power(paired(values), 0.026), "lower")
    assert (word in ("better", "worse")) == (low > 0 or high < 0)


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.8, 15)])
def test_the_pairs_to_resolve_are_the_fewest_by_scipys_noncentral_t(effect, pairs):
    for count, enough in ((pairs, True), (pairs - 1, False)):
        theirs = scipy.stats.nct.sf(scipy.stats.t.ppf(0.975, count - 1), count - 1, effect * math.sqrt(count))
        assert (theirs >= 0.8) == enough
    assert pairs_to_resolve(0.058, 0.058 * effect) == pairs


def test_the_power_of_equivalence_equals_powertost():
    """The manual of the R package PowerTOST: a crossover of 40, CV 30%, true ratio 0.95, 80 to 125%: 0.815845."""
    error = math.sqrt(math.log(1 + 0.3**2) * 2 / 40)
    assert equivalence_power(math.log(1.25), error, 38, math.log(0.95)) == pytest.approx(0.815845, abs=1e-5)


@pytest.mark.parametrize("margin", [0.026, 0.1])
def test_one_pair_fewer_has_less_than_80_percent_power_of_equivalence(margin):
    pairs = pairs_to_equate(0.058, margin)
    assert equivalence_power(margin, 0.058 / math.sqrt(pairs), pairs - 1) >= 0.8
    assert equivalence_power(margin, 0.058 / math.sqrt(pairs - 1), pairs - 2) < 0.8
