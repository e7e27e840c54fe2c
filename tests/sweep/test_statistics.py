"""Statistics equal scipy's, and a worked example."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from simbal.sweep.statistics import Summary, paired_difference, student_quantile, summarize

VALUES = st.floats(-1e3, 1e3)
BY_SEED = st.dictionaries(st.integers(0, 9), VALUES, min_size=1)


def test_mean_and_standard_deviation_of_a_worked_example():
    assert summarize([1.0, 2.0, 3.0, 4.0, 5.0]) == Summary(3.0, math.sqrt(2.5), 5)


def test_one_value_has_no_standard_deviation_and_none_no_summary():
    assert summarize([7.0]) == Summary(7.0, None, 1)
    assert summarize([]) is None


@given(st.lists(VALUES, min_size=2))
def test_the_standard_deviation_divides_by_n_less_one(values):
    summary = summarize(values)
    assert summary.sd == pytest.approx(np.std(values, ddof=1), rel=1e-6, abs=1e-6)


def test_a_paired_difference_worked_by_hand():
    baseline = dict.fromkeys(range(5), 10.0)
    difference = paired_difference({seed: 10.0 + seed + 1 for seed in range(5)}, baseline)
    # differences 1..5: standard error sqrt(2.5 / 5), and t(0.975, 4 degrees of freedom) = 2.776445
    half = 2.776445105 * math.sqrt(0.5)
    assert (difference.mean, difference.pairs) == (3.0, 5)
    assert (difference.low, difference.high) == pytest.approx((3 - half, 3 + half))


@given(BY_SEED, BY_SEED)
def test_the_interval_is_that_of_scipys_paired_t_test(treatment, baseline):
    difference = paired_difference(treatment, baseline)
    shared = sorted(treatment.keys() & baseline.keys())
    if not shared:
        assert difference is None
        return
    assert difference.pairs == len(shared)
    if len(shared) == 1:
        assert (difference.low, difference.high) == (None, None)
        return
    pairs = [treatment[seed] - baseline[seed] for seed in shared]
    half = scipy.stats.sem(pairs) * scipy.stats.t.ppf(0.975, len(pairs) - 1)
    assert difference.low == pytest.approx(difference.mean - half, rel=1e-6, abs=1e-6)
    assert difference.high == pytest.approx(difference.mean + half, rel=1e-6, abs=1e-6)


def test_the_papers_welch_interval_follows_from_our_quantile():
    """PAPER 3.4: df 6.96907, standard error 0.0209619, difference 0.360 give [0.31039, 0.40961]."""
    half = student_quantile(0.975, 6.96907) * 0.0209619
    assert (0.360 - half, 0.360 + half) == pytest.approx((0.31039, 0.40961), abs=1e-5)
