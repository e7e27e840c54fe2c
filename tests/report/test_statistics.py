"""Statistics equal scipy's, and worked examples; no variance and no seeds give None, never nan."""

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
    holm,
    paired_difference,
    relative,
    standard_deviation,
    student_quantile,
    summarize,
    welch_test,
)

VALUES = st.floats(-1e3, 1e3)
BY_SEED = st.dictionaries(st.integers(0, 9), VALUES, min_size=1)
APART = st.lists(st.integers(-1000, 1000), min_size=2, max_size=9).filter(lambda values: len(set(values)) > 1)
P_VALUES = st.lists(st.floats(0, 1), max_size=9)


def test_mean_and_standard_deviation_of_a_worked_example():
    assert summarize([1.0, 2.0, 3.0, 4.0, 5.0]) == Summary(3.0, math.sqrt(2.5), 5)


def test_one_value_has_no_standard_deviation_and_none_no_summary():
    assert summarize([7.0]) == Summary(7.0, None, 1)
    assert summarize([]) is None


@given(st.lists(st.floats(-1e150, 1e150) | st.floats(-2.0, 2.0) | st.integers(-9, 9), min_size=2, max_size=9))
def test_the_standard_deviation_is_that_of_the_standard_library(values):
    assert standard_deviation(values) == pytest.approx(stdev(values), rel=1e-14, abs=0)


@given(VALUES, st.integers(2, 9))
def test_equal_values_have_a_standard_deviation_of_exactly_0(value, count):
    assert standard_deviation([value] * count) == 0


def test_a_paired_difference_worked_by_hand():
    baseline = dict.fromkeys(range(5), 10.0)
    difference = paired_difference({seed: 10.0 + seed + 1 for seed in range(5)}, baseline)
    # differences 1..5: standard error sqrt(2.5 / 5), and t(0.975, 4 degrees of freedom) = 2.776445
    half = 2.776445105 * math.sqrt(0.5)
    assert (difference.mean, difference.pairs) == (3.0, 5)
    assert (difference.low, difference.high) == pytest.approx((3 - half, 3 + half))
    assert difference.effect == pytest.approx(3 / math.sqrt(2.5))
    # t = 3 / sqrt(0.5) with 4 degrees of freedom, whose distribution has a closed form
    x = math.atan(3 / math.sqrt(0.5) / 2)
    assert difference.p == pytest.approx(1 - math.sin(x) * (1 + math.cos(x) ** 2 / 2))


@given(BY_SEED, BY_SEED)
def test_the_interval_is_that_of_scipys_paired_t_test(treatment, baseline):
    difference = paired_difference(treatment, baseline)
    shared = sorted(treatment.keys() & baseline.keys())
    if not shared:
        assert difference is None
        return
    assert difference.pairs == len(shared)
    pairs = [treatment[seed] - baseline[seed] for seed in shared]
    if len(shared) == 1 or difference.low is None:
        assert (difference.low, difference.high, difference.p, difference.effect) == (None,) * 4
        assert len(shared) == 1 or stdev(pairs) < 1e-9
        return
    half = scipy.stats.sem(pairs) * scipy.stats.t.ppf(0.975, len(pairs) - 1)
    assert difference.low == pytest.approx(difference.mean - half, rel=1e-6, abs=1e-6)
    assert difference.high == pytest.approx(difference.mean + half, rel=1e-6, abs=1e-6)


@given(APART, st.data())
def test_p_is_that_of_scipys_paired_t_test_and_the_interval_holds_zero_where_it_is_above_5_percent(pairs, data):
    baseline = data.draw(st.lists(st.integers(-1000, 1000), min_size=len(pairs), max_size=len(pairs)))
    treatment = [value + difference for value, difference in zip(baseline, pairs, strict=True)]
    found = paired_difference(dict(enumerate(treatment)), dict(enumerate(baseline)))
    assert found.p == pytest.approx(scipy.stats.ttest_rel(treatment, baseline).pvalue, rel=1e-6)
    assert found.effect == pytest.approx(fmean(pairs) / stdev(pairs))
    assume(abs(found.p - 0.05) > 1e-9)
    assert (found.low < 0 < found.high) == (found.p > 0.05)


@given(APART, APART)
def test_welch_is_scipys_test_of_unequal_variances(treatment, baseline):
    found, theirs = welch_test(treatment, baseline), scipy.stats.ttest_ind(treatment, baseline, equal_var=False)
    assert (found.p, found.degrees_of_freedom) == pytest.approx((theirs.pvalue, theirs.df), rel=1e-6)
    assert found.mean == pytest.approx(fmean(treatment) - fmean(baseline))
    back = welch_test(baseline, treatment)
    assert (back.mean, back.p) == pytest.approx((-found.mean, found.p))


def test_welch_uses_the_seeds_that_only_one_arm_has_and_needs_two_of_each():
    treatment, baseline = {0: 1.0, 1: 2.0, 2: 9.0}, {0: 5.0, 5: 6.0}
    found = paired_difference(treatment, baseline)
    assert (found.pairs, found.p) == (1, None)
    assert found.welch == welch_test([1.0, 2.0, 9.0], [5.0, 6.0])
    assert paired_difference({0: 1.0, 1: 2.0}, {0: 5.0}).welch is None


def test_the_papers_welch_test_follows_from_its_means_and_deviations():
    """PAPER 3.4: 14.051 sd 0.026 and 13.691 sd 0.039 of five models each give df 6.96907 and p 5.83e-7."""
    spread = [step / math.sqrt(2.5) for step in (-2, -1, 0, 1, 2)]  # standard deviation 1
    found = welch_test([14.051 + 0.026 * z for z in spread], [13.691 + 0.039 * z for z in spread])
    assert (found.mean, found.degrees_of_freedom, found.p) == pytest.approx((0.36, 6.96907, 5.83e-7), rel=1e-3)


def test_the_papers_welch_interval_follows_from_our_quantile():
    """PAPER 3.4: df 6.96907, standard error 0.0209619, difference 0.360 give [0.31039, 0.40961]."""
    half = student_quantile(0.975, 6.96907) * 0.0209619
    assert (0.360 - half, 0.360 + half) == pytest.approx((0.31039, 0.40961), abs=1e-5)


@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_without_variance_there_is_neither_interval_nor_test(shift):
    baseline = {0: 1.1, 1: 2.2, 2: 3.3}  # 2.2 + 0.1 - 2.2 is not quite 0.1: a variance of rounding is none
    found = paired_difference({seed: value + shift for seed, value in baseline.items()}, baseline)
    assert found.mean == pytest.approx(shift)
    assert (found.low, found.high, found.p, found.effect) == (None,) * 4
    same = welch_test([2.0 + shift] * 2, [2.0] * 3)
    assert (same.p, same.degrees_of_freedom) == (None, None)


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_one_ratio_in_all_pairs_has_no_variance_either(factor):
    baseline = {0: 1.1, 1: 2.2, 2: 3.3}
    found = paired_difference({seed: value * factor for seed, value in baseline.items()}, baseline, ratio=True)
    assert relative(found.mean) == pytest.approx(factor - 1)
    assert (found.low, found.p, found.effect) == (None,) * 3


def test_a_ratio_is_the_paired_test_of_logarithms():
    treatment, baseline = [14.0, 13.5, 13.9], [14.4, 14.1, 13.8]
    found = paired_difference(dict(enumerate(treatment)), dict(enumerate(baseline)), ratio=True)
    theirs = scipy.stats.ttest_rel(np.log(treatment), np.log(baseline))
    bounds = theirs.confidence_interval()
    assert (found.p, found.low, found.high) == pytest.approx((theirs.pvalue, bounds.low, bounds.high))
    geometric = scipy.stats.gmean(treatment) / scipy.stats.gmean(baseline)
    assert (found.scale, relative(found.mean)) == ("ln", pytest.approx(geometric - 1))


@given(APART, st.floats(0.01, 100))
def test_a_ratio_does_not_depend_on_the_unit(exponents, unit):
    treatment, baseline = {i: 1.01**x for i, x in enumerate(exponents)}, dict.fromkeys(range(len(exponents)), 1.0)
    one = paired_difference(treatment, baseline, ratio=True)
    scaled = [{seed: unit * value for seed, value in values.items()} for values in (treatment, baseline)]
    other = paired_difference(*scaled, ratio=True)
    assert (one.mean, one.p) == pytest.approx((other.mean, other.p), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_statistics_are_of_finite_numbers(wrong):
    for call in (
        lambda: summarize([1.0, wrong]),
        lambda: welch_test([1.0, 2.0], [wrong, 1.0]),
        lambda: paired_difference({0: 1.0, 1: wrong}, {0: 1.0, 1: 2.0}),
        lambda: paired_difference({0: 1.0}, {0: 1.0, 1: wrong}, ratio=True),
        lambda: holm([0.5, wrong]),
        lambda: student_quantile(wrong, 3),
        lambda: student_quantile(0.5, wrong),
    ):
        with pytest.raises(ValueError, match=str(wrong)):
            call()


@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_a_ratio_is_of_values_above_zero(wrong):
    with pytest.raises(ValueError, match="has no logarithm"):
        paired_difference({0: 1.0}, {0: wrong}, ratio=True)


def test_one_arm_without_variance_leaves_the_degrees_of_freedom_of_the_other():
    assert welch_test([3.0, 3.0, 3.0], [1.0, 2.0, 3.0, 4.0]).degrees_of_freedom == pytest.approx(3)


@given(st.dictionaries(st.integers(0, 9), st.floats(-1e12, 1e12)), st.dictionaries(st.integers(0, 9), st.floats(-1, 1)))
def test_no_values_give_nan_or_infinity_or_a_p_beyond_1(treatment, baseline):
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
    assert len(corrected) == len(p_values)
    for p, larger in zip(p_values, corrected, strict=True):
        assert p <= larger <= min(1, len(p_values) * p)
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    assert [corrected[i] for i in order] == sorted(corrected)


@given(P_VALUES, st.randoms())
def test_holm_does_not_depend_on_the_order_of_arms(p_values, random):
    shuffled = random.sample(range(len(p_values)), len(p_values))
    assert [holm(p_values)[i] for i in shuffled] == holm([p_values[i] for i in shuffled])
