"""What a paired difference may conclude: one word, and the smallest difference that so many pairs could have shown."""

from dataclasses import replace
from functools import cache
from math import isfinite, sqrt
from typing import Literal

from simbal.metrics.table import Metric
from simbal.report.documents import CONFIDENCE
from simbal.report.statistics import PairedDifference, student_quantile

POWER = 0.8
ALPHA = 1 - CONFIDENCE
NO_OTHER_TAIL = 8.0  # standard errors: the chance of the other sign is below 1e-15, and scipy's function of it NaN
STEPS = 60  # of a bisection: each halves the bracket, so that 2^-60 of it is left
Word = Literal["better", "worse", "higher", "lower", "equivalent", "not resolved"]
UNRESOLVED: Word = "not resolved"


def examined(difference: PairedDifference, metric: Metric, margin: float | None) -> PairedDifference:
    """Return the difference with what could have been detected and, within a margin that is meant for it, TOST's p.

    Args:
        difference: of `metric`.
        metric: whose `margin` says whether the margin is meant for it.
        margin: nats per token; None: the runs name several.
    """
    if difference.sd is None:
        return difference
    seen = detectable(difference.sd, difference.pairs)
    if margin is None or not metric.margin:
        return replace(difference, detectable=seen)
    error = difference.sd / sqrt(difference.pairs)
    p = equivalence_p(difference.mean, error, difference.pairs - 1, margin)
    return replace(difference, detectable=seen, p_equivalent=p)


def concluded(difference: PairedDifference, better: str) -> Word:
    """Return what the tests at 5% say; a clear difference is named even if it is smaller than the margin.

    Args:
        difference: with the p of both tests, corrected where several arms are compared.
        better: the better direction of the metric, `lower`, `higher` or `neither`.
    """
    p = difference.p if difference.p_holm is None else difference.p_holm
    if p is not None and p < ALPHA:
        direction: Word = "higher" if difference.mean > 0 else "lower"
        if better == "neither":
            return direction
        return "better" if direction == better else "worse"
    if difference.p_equivalent is not None and difference.p_equivalent < ALPHA:
        return "equivalent"
    return UNRESOLVED


def equivalence_p(mean: float, error: float, degrees_of_freedom: float, margin: float) -> float:
    """Return the p of two one-sided t tests, the larger: small if the true difference lies within ± `margin`.

    It is below 5% exactly where the 90% interval lies within the margin.
    Reference: D. J. Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15 (1987).

    Raises:
        ValueError: a number is NaN or infinite, or error or margin not above 0.
    """
    from scipy.special import stdtr

    if not (isfinite(mean) and isfinite(error) and isfinite(margin) and error > 0 and margin > 0):
        raise ValueError(f"no test of equivalence has mean {mean}, standard error {error} and margin {margin}")
    return float(stdtr(degrees_of_freedom, (abs(mean) - margin) / error))


def detectable(sd: float, pairs: int) -> float:
    """Return the true difference that a two-sided paired t test at 5% finds with 80% power.

    Args:
        sd: standard deviation of the differences, taken for the true one.
        pairs: at least two.
    """
    return noncentrality(pairs - 1) * sd / sqrt(pairs)


@cache
def noncentrality(degrees_of_freedom: int, wanted: float = POWER) -> float:
    """Return the true mean in standard errors for which the two-sided t test at 5% has the power `wanted`."""
    low, high = 0.0, 2 * student_quantile(1 - ALPHA / 2, degrees_of_freedom)
    assert power(high, degrees_of_freedom) > wanted
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, degrees_of_freedom) < wanted else (low, middle)
    return high


def power(noncentrality: float, degrees_of_freedom: int) -> float:
    """Return the chance that a two-sided t test at 5% rejects, by the noncentral t distribution.

    Reference: J. Cohen, Statistical Power Analysis for the Behavioral Sciences (1988), chapter 2.

    Args:
        noncentrality: the true mean by its true standard error; up to twice the critical t, where scipy still has it.
        degrees_of_freedom: at least one.
    """
    from scipy.special import nctdtr

    critical = student_quantile(1 - ALPHA / 2, degrees_of_freedom)
    above = 1 - nctdtr(degrees_of_freedom, noncentrality, critical)
    below = nctdtr(degrees_of_freedom, noncentrality, -critical) if noncentrality < NO_OTHER_TAIL else 0.0
    return float(above + below)
