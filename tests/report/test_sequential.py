"""Boundaries of a group-sequential plan equal published values, and looks apply them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from simbal.report.sequential import boundaries, decide, spent_error

FIVES = range(5, 45, 5)


def test_equal_looks_have_the_published_boundaries():
    """Lan and DeMets's O'Brien-Fleming-type boundaries of five equal looks at a two-sided 5%, as z."""
    z = [-norm.ppf(p / 2) for p in boundaries([10, 20, 30, 40, 50], 50)]
    assert z == pytest.approx([4.877, 3.357, 2.680, 2.290, 2.031], abs=6e-4)


def test_one_look_at_the_end_is_the_plain_test():
    assert boundaries([40], 40) == [pytest.approx(0.05)]


@given(st.lists(st.integers(2, 60), min_size=1, max_size=4, unique=True).map(sorted), st.floats(0.001, 0.2))
def test_no_look_is_more_lenient_than_the_error_spent(looks, alpha):
    found = boundaries(looks, 60, alpha)
    assert found[0] == pytest.approx(spent_error(looks[0] / 60, alpha))
    for p, look in zip(found, looks, strict=True):
        assert 0 <= p <= spent_error(look / 60, alpha) * 1.001 + 1e-12  # the grid has four digits


def pairs(mean, spread, count):
    """Differences with this mean, half of them above and half below."""
    return [mean + spread * (-1) ** i for i in range(count)]


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
def test_the_decision_of_a_look(differences, word):
    assert decide(differences, FIVES, 40, margin=0.026) == word


def test_an_early_look_needs_more_than_p_below_5_percent_and_equivalence_needs_a_margin():
    early = pairs(-0.05, 0.05, 10)  # t = -3, p = 0.015
    assert decide(early, FIVES, 40) is None
    assert decide(early, [10], 10) == "lower"
    assert decide(pairs(0.0, 0.001, 10), FIVES, 40) is None
