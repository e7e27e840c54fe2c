"""Boundaries of a group-sequential plan equal published values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from simbal.report.sequential import boundaries, spent_error


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
