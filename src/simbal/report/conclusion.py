"""What a paired difference may conclude: one word, and the smallest difference that so many pairs could have shown."""

from dataclasses import replace
from functools import cache
from math import isfinite, sqrt
from typing import Literal

from simbal.metrics.definitions import Metric
from simbal.report.documents import CONFIDENCE
from simbal.report.statistics import PairedDifference, student_quantile

POWER = 0.8
ALPHA = 1 - CONFIDENCE
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
def noncentrality(degrees_of_freedom: int) -> float:
    """Return the true mean in standard errors that the two-sided t test at 5% finds, with its sign, in 80% of studies.

    Reference: J. Cohen, Statistical Power Analysis for the Behavioral Sciences (1988), chapter 2.
    """
    from scipy.special import nctdtrinc

    critical = student_quantile(1 - ALPHA / 2, degrees_of_freedom)
    return float(nctdtrinc(degrees_of_freedom, 1 - POWER, critical))
