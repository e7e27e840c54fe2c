"""In simulated studies the conclusions of a table have the stated error, at one look or several.

The limits are the rates of 10,000 studies (`python -m benchmarks.error_rates`) plus the allowance for 2,000.
"""

from math import sqrt

import pytest

from benchmarks.error_rates import wrong_percent, wrong_percent_with_looks

pytestmark = pytest.mark.slow

STUDIES = 2_000


def allowed(percent):
    """The rate, plus three binomial standard errors."""
    return percent + 300 * sqrt(percent / 100 * (1 - percent / 100) / STUDIES)


@pytest.mark.parametrize(
    ("noise", "arms", "seeds", "percent"),
    [
        ("equal noise", 2, 5, 5.0),
        ("equal noise", 10, 3, 5.1),
        ("equal noise", 40, 5, 5.0),
        ("noise from 1x to 2x", 10, 5, 6.2),
        ("baseline 2x", 10, 5, 7.0),
        ("one arm 5x", 10, 5, 6.7),
        ("heavy tails (t, 4 df)", 10, 5, 5.0),
    ],
)
def test_equal_arms_are_rarely_called_better_or_worse(noise, arms, seeds, percent):
    assert wrong_percent(noise, STUDIES, arms, seeds) <= allowed(percent)


@pytest.mark.parametrize(("arms", "seeds"), [(2, 5), (10, 10)])
def test_arms_that_differ_by_the_margin_are_rarely_called_equivalent(arms, seeds):
    assert wrong_percent("equal noise", STUDIES, arms, seeds, true=0.026) <= allowed(2.5)


@pytest.mark.parametrize(("noise", "true"), [("equal noise", 0.0), ("baseline 2x", 0.0), ("equal noise", 0.026)])
def test_a_sequential_plan_is_rarely_wrong(noise, true):
    wrong, seeds = wrong_percent_with_looks(noise, STUDIES, 5, true)
    assert wrong <= allowed(5.0)
    assert 5 <= seeds <= 40
