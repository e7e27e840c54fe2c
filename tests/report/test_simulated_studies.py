"""In simulated studies of a known effect, intervals and tests have the stated error, at one look or several.

Each test simulates 4,000 studies, or 50,000 of a sequential plan, and allows three binomial standard errors.
"""

from math import sqrt

import numpy as np
import pytest
from scipy.special import stdtr

from simbal.report.sequential import boundaries, decide
from simbal.report.statistics import conclusion_word, paired_difference, with_power

pytestmark = pytest.mark.slow

STUDIES, MANY, SPREAD, MARGIN = 4_000, 50_000, 0.058, 0.026
ALLOWED, ALLOWED_OF_MANY = (3 * sqrt(0.05 * 0.95 / count) for count in (STUDIES, MANY))
EXCESS = 0.002  # of the significance-level approach, see sequential.py
LOOKS = [*range(5, 45, 5)]


def studies(true, pairs, spread=SPREAD, count=STUDIES):
    """Differences of losses, a row for each study."""
    return np.random.default_rng(pairs).normal(true, spread, (count, pairs))


def differences(simulated):
    for row in simulated.tolist():
        found = paired_difference(dict(enumerate(row)), dict.fromkeys(range(len(row)), 0.0))
        assert found is not None
        yield found


@pytest.mark.parametrize("pairs", [2, 5])
def test_95_percent_of_intervals_cover_the_true_difference(pairs):
    found = differences(studies(-MARGIN, pairs))
    coverage = np.mean([one.low <= -MARGIN <= one.high for one in found])
    assert coverage == pytest.approx(0.95, abs=ALLOWED)


@pytest.mark.parametrize(("pairs", "spread"), [(5, 0.01), (20, 0.03)])
def test_arms_that_differ_by_the_margin_are_called_equivalent_in_at_most_5_percent(pairs, spread):
    found = [with_power(one, MARGIN).p_equivalent for one in differences(studies(MARGIN, pairs, spread))]
    error = np.mean(np.array(found) < 0.05)
    assert error <= 0.05 + ALLOWED


def test_equal_arms_are_called_better_or_worse_in_5_percent():
    words = [conclusion_word(with_power(one, MARGIN), "lower") for one in differences(studies(0.0, 5))]
    error = np.mean([word in ("better", "worse") for word in words])
    assert error == pytest.approx(0.05, abs=ALLOWED)


def p_at_looks(simulated, shift=0.0):
    """The t of the mean less `shift`, and the degrees of freedom, at each look."""
    means = np.stack([simulated[:, :look].mean(axis=1) for look in LOOKS])
    errors = np.stack([simulated[:, :look].std(axis=1, ddof=1) / sqrt(look) for look in LOOKS])
    return (means - shift) / errors, np.array(LOOKS)[:, None] - 1


def test_a_sequential_plan_finds_a_difference_of_equal_arms_in_about_5_percent():
    simulated = studies(0.0, 40, count=MANY)
    t, degrees = p_at_looks(simulated)
    p = 2 * stdtr(degrees, -np.abs(t))
    stopped = p <= np.array(boundaries(LOOKS, 40))[:, None]
    error, naive = stopped.any(axis=0).mean(), (p < 0.05).any(axis=0).mean()
    assert error <= 0.05 + EXCESS + ALLOWED_OF_MANY
    assert naive > 0.15
    for study, stops in zip(simulated[:100], stopped.T[:100], strict=True):
        words = [decide(study[:look].tolist(), LOOKS, 40) for look in LOOKS]
        assert [word in ("lower", "higher") for word in words] == stops.tolist()


def test_a_sequential_plan_calls_arms_equivalent_that_differ_by_the_margin_in_about_5_percent():
    simulated = studies(MARGIN, 40, 0.03, count=MANY)
    (below, degrees), (above, _) = p_at_looks(simulated, MARGIN), p_at_looks(simulated, -MARGIN)
    p = np.maximum(stdtr(degrees, below), stdtr(degrees, -above))
    error = (p <= np.array(boundaries(LOOKS, 40, 0.1))[:, None] / 2).any(axis=0).mean()
    assert error <= 0.05 + EXCESS + ALLOWED_OF_MANY
