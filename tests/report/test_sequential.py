"""Boundaries of a group-sequential plan are the published ones, and a look decides by them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from simbal.report.sequential import boundaries, decided, spent

FIVES = range(5, 45, 5)


def z_of(nominal):
    return [-norm.ppf(p / 2) for p in nominal]


@pytest.mark.parametrize(
    ("looks", "published"),
    [
        (1, [1.960]),
        (5, [4.877, 3.357, 2.680, 2.290, 2.031]),
    ],
)
def test_equal_looks_have_the_published_boundaries(looks, published):
    """Lan and DeMets's O'Brien-Fleming-type boundaries of five equal looks at a two-sided 5%, as z."""
    found = boundaries([10 * look for look in range(1, looks + 1)], 10 * looks)
    assert z_of(found) == pytest.approx(published, abs=6e-4)


def test_one_look_at_the_end_is_the_plain_test():
    assert boundaries([40], 40) == [pytest.approx(0.05)]


@given(st.lists(st.integers(2, 60), min_size=1, max_size=6, unique=True).map(sorted), st.floats(0.001, 0.2))
def test_looks_grow_more_lenient_and_none_is_more_so_than_what_is_spent(looks, alpha):
    found = boundaries(looks, 60, alpha)
    assert found[0] == pytest.approx(spent(looks[0] / 60, alpha))
    for p, look in zip(found, looks, strict=True):
        assert 0 <= p <= spent(look / 60, alpha) * 1.001 + 1e-12  # the grid has four digits


@pytest.mark.parametrize("looks", [[], [1, 5], [5, 5], [10, 5], [5, 41]])
def test_looks_that_make_no_plan_are_refused(looks):
    with pytest.raises(ValueError, match="must increase from 2 or more to 40 or less"):
        boundaries(looks, 40)


@pytest.mark.parametrize("alpha", [0.0, 1.0, math.nan])
def test_an_error_that_is_none_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha .* must lie between 0 and 1"):
        boundaries([5], 5, alpha)


def pairs(mean, spread, count):
    """Differences of this mean, half of them above and half below, the last at the mean if their number is odd."""
    return [mean + spread * (-1) ** i for i in range(count - count % 2)] + [mean] * (count % 2)


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        (pairs(-0.5, 0.05, 10), "lower"),
        (pairs(0.5, 0.05, 10), "higher"),
        (pairs(0.0, 0.05, 10), None),
        (pairs(0.0, 0.001, 10), "equivalent"),
        (pairs(0.0, 0.2, 40), "not resolved"),
        (pairs(-0.02, 0.05, 40), "lower"),  # p is about 0.016
        ([0.3] * 10, None),
    ],
)
def test_what_a_look_decides(differences, word):
    assert decided(differences, FIVES, 40, margin=0.026) == word


def test_a_p_below_5_percent_is_not_enough_at_an_early_look():
    early = pairs(-0.05, 0.05, 10)  # t = -3, p = 0.015
    assert decided(early, FIVES, 40) is None
    assert decided(early, [10], 10) == "lower"


def test_equivalence_is_not_found_where_it_is_not_asked_for():
    assert decided(pairs(0.0, 0.001, 10), FIVES, 40) is None


def test_only_a_planned_look_decides():
    with pytest.raises(ValueError, match="there is no look at 7 pairs: looks are at 5, 10"):
        decided([0.0] * 7, [5, 10], 10)
