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
    interval,
    logarithms,
    paired_difference,
    relative,
    student_quantile,
    summarize,
    welch_test,
)

APART = st.lists(st.integers(-1000, 1000), min_size=2, max_size=9).filter(lambda values: len(set(values)) > 1)


def paired(differences):
    return paired_difference(dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0))


def test_mean_and_standard_deviation_of_a_worked_example():
    assert summarize([1.0, 2.0, 3.0, 4.0, 5.0]) == Summary(3.0, math.sqrt(2.5), 5)
    assert summarize([7.0]) == Summary(7.0, None, 1)
    assert summarize([]) is None


def test_a_paired_difference_worked_by_hand():
    difference = paired([1, 2, 3, 4, 5])
    assert (difference.mean, difference.pairs) == (3.0, 5)
    assert (difference.sd, difference.effect) == pytest.approx((math.sqrt(2.5), 3 / math.sqrt(2.5)))
    # t = 3 / sqrt(0.5) with 4 degrees of freedom, whose distribution has a closed form
    x = math.atan(3 / math.sqrt(0.5) / 2)
    assert difference.p_paired == pytest.approx(1 - math.sin(x) * (1 + math.cos(x) ** 2 / 2))


@given(APART, st.data())
def test_interval_and_p_equal_scipys_paired_t_test(pairs, data):
    baseline = data.draw(st.lists(st.integers(-1000, 1000), min_size=len(pairs), max_size=len(pairs)))
    treatment = [value + difference for value, difference in zip(baseline, pairs, strict=True)]
    found = paired_difference(dict(enumerate(treatment)), dict(enumerate(baseline)))
    theirs = scipy.stats.ttest_rel(treatment, baseline)
    bounds = theirs.confidence_interval()
    assert (found.p_paired, *interval(summarize(pairs))) == pytest.approx(
        (theirs.pvalue, bounds.low, bounds.high), rel=1e-6
    )
    assert found.effect == pytest.approx(fmean(pairs) / stdev(pairs))


def test_only_shared_seeds_are_paired_while_welch_uses_all():
    found = paired_difference({0: 1.0, 1: 2.0, 2: 9.0}, {0: 5.0, 5: 6.0})
    assert (found.mean, found.pairs, found.sd, found.p_paired) == (-4.0, 1, None, None)
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


@pytest.mark.parametrize("change", [0.0, 0.1])
def test_without_noise_there_is_no_test(change):
    baseline = {0: 1.1, 1: 2.2, 2: 3.3}  # 2.2 + 0.1 - 2.2 is not exactly 0.1: rounding is no noise
    found = paired_difference({seed: value + change for seed, value in baseline.items()}, baseline)
    assert found.mean == pytest.approx(change)
    assert (found.sd, found.p_paired, found.effect) == (None,) * 3
    ratio = paired_difference(*(logarithms({s: v * k for s, v in baseline.items()}) for k in (1 + change, 1)), "ln")
    assert relative(ratio.mean) == pytest.approx(change)
    assert ratio.sd is None
    assert welch_test([2.0 + change] * 2, [2.0] * 3).p is None


def test_a_ratio_is_the_paired_test_of_logarithms():
    treatment, baseline = [14.0, 13.5, 13.9], [14.4, 14.1, 13.8]
    found = paired_difference(*(logarithms(dict(enumerate(values))) for values in (treatment, baseline)), "ln")
    assert found.p_paired == pytest.approx(scipy.stats.ttest_rel(np.log(treatment), np.log(baseline)).pvalue)
    geometric = scipy.stats.gmean(treatment) / scipy.stats.gmean(baseline)
    assert relative(found.mean) == pytest.approx(geometric - 1)


def test_values_without_a_mean_or_a_logarithm_are_errors():
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match=str(wrong)):
            summarize([1.0, wrong])
        with pytest.raises(ValueError, match=str(wrong)):
            logarithms({0: 1.0, 1: wrong})
    with pytest.raises(ValueError, match="0.0 has no logarithm"):
        logarithms({0: 0.0})


@given(st.dictionaries(st.integers(0, 9), st.floats(-1e12, 1e12)), st.dictionaries(st.integers(0, 9), st.floats(-1, 1)))
def test_no_input_gives_nan_or_a_p_above_1(treatment, baseline):
    found = paired_difference(treatment, baseline)
    assume(found)
    numbers = [*astuple(found)[:5], *(astuple(found.welch) if found.welch else ())]
    assert all(math.isfinite(number) for number in numbers if number is not None)
    assert all(0 <= p <= 1 for p in (found.p_paired, found.welch and found.welch.p) if p is not None)
