"""Statistics over a few seeds: means, paired differences, conclusions and power."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import expm1, hypot, inf, isfinite, log, sqrt
from statistics import fmean, stdev
from typing import Literal

from simbal.report.bootstrap import CONFIDENCE, OverDocuments

ALPHA = 1 - CONFIDENCE
POWER = 0.8
ROUNDING = 1e-12  # relative to the largest value: smaller differences are rounding errors
MIDPOINTS = 10_000  # of the integral in `equivalence_power`, whose error is then below 1e-6
Scale = Literal["difference", "ln"]  # ln: differences of natural logarithms, so that exp of one is a ratio
Word = Literal["better", "worse", "higher", "lower", "equivalent", "not resolved"]
UNRESOLVED: Word = "not resolved"


@dataclass(frozen=True)
class Summary:
    """Mean and standard deviation of one metric over the seeds of an arm."""

    mean: float
    sd: float | None  # with n - 1 in the denominator; None for a single seed
    n: int


@dataclass(frozen=True)
class Welch:
    """Welch's t test of treatment minus baseline over all seeds of both arms.

    Degrees of freedom and p are None if neither arm varies.
    """

    mean: float  # difference of the means
    degrees_of_freedom: float | None
    p: float | None  # two-sided


@dataclass(frozen=True)
class PairedDifference:
    """Treatment minus baseline over the seeds that both arms have.

    Numbers that need more seeds are None. The interval and the tests are also None if all differences are equal: they
    need an estimate of the noise.
    """

    mean: float
    sd: float | None  # of the differences, with n - 1 in the denominator
    low: float | None  # lower end of Student's 95% interval
    high: float | None
    pairs: int
    p: float | None  # two-sided, paired t test
    effect: float | None  # Cohen's d_z: mean / sd of the differences
    welch: Welch | None
    scale: Scale = "difference"
    p_holm: float | None = None  # corrected for the number of comparisons; None for a single comparison
    detectable: float | None = None  # the true difference that this test detects with 80% power
    p_equivalent: float | None = None  # p of TOST for the margin, corrected like p_holm
    conclusion: str = UNRESOLVED
    over_documents: OverDocuments | None = None  # of a loss, or of the logarithm of a perplexity


def summarize(values: Sequence[float]) -> Summary | None:
    """Return mean, standard deviation and count, or None for no values; `ValueError` for NaN and infinity."""
    _require_finite(values)
    return Summary(fmean(values), stdev(values) if len(values) > 1 else None, len(values)) if values else None


def paired_difference(
    treatment: Mapping[int, float], baseline: Mapping[int, float], ratio: bool = False
) -> PairedDifference | None:
    """Compare two arms on their shared seeds by a paired t test; None if they share no seed.

    A seed fixes the data order and the initial weights, so pairing removes their noise. Interval and tests assume
    normally distributed differences.

    Args:
        treatment: values by seed.
        baseline: values by seed.
        ratio: compare natural logarithms; exp of the mean is then the geometric mean of the ratios.

    Raises:
        ValueError: a value is NaN or infinite, or not positive although `ratio` is set.
    """
    if ratio:
        treatment, baseline = _logarithms(treatment), _logarithms(baseline)
    scale: Scale = "ln" if ratio else "difference"
    shared = sorted(treatment.keys() & baseline)
    welch = welch_test([*treatment.values()], [*baseline.values()])
    differences = summarize([treatment[seed] - baseline[seed] for seed in shared])
    if differences is None:
        return None
    largest = max(abs(values[seed]) for values in (treatment, baseline) for seed in shared)
    largest = max(largest, 1.0) if ratio else largest  # a logarithm near 0 has the rounding error of a number near 1
    if differences.sd is None or differences.sd <= ROUNDING * largest:
        return PairedDifference(differences.mean, None, None, None, differences.n, None, None, welch, scale)
    p = _p_of_t(differences.mean / (differences.sd / sqrt(differences.n)), differences.n - 1)
    effect = differences.mean / differences.sd
    low, high = interval(differences)
    return PairedDifference(differences.mean, differences.sd, low, high, differences.n, p, effect, welch, scale)


def interval(summary: Summary) -> tuple[float | None, float | None]:
    """Return Student's 95% interval of a mean; (None, None) for a single value."""
    if summary.sd is None:
        return None, None
    half = student_quantile(0.5 + CONFIDENCE / 2, summary.n - 1) * summary.sd / sqrt(summary.n)
    return summary.mean - half, summary.mean + half


def welch_test(treatment: Sequence[float], baseline: Sequence[float]) -> Welch | None:
    """Run Welch's t test with Satterthwaite's degrees of freedom; None unless both arms have two seeds.

    Reference: B. L. Welch, Biometrika 34 (1947).
    """
    ours, theirs = summarize(treatment), summarize(baseline)
    if ours is None or theirs is None or ours.sd is None or theirs.sd is None:
        return None
    difference = ours.mean - theirs.mean
    errors = ours.sd / sqrt(ours.n), theirs.sd / sqrt(theirs.n)
    error, largest = hypot(*errors), max(map(abs, [*treatment, *baseline]))
    if error <= ROUNDING * largest:
        return Welch(difference, None, None)
    share = (errors[0] / error) ** 2
    degrees = 1 / (share**2 / (ours.n - 1) + (1 - share) ** 2 / (theirs.n - 1))
    return Welch(difference, degrees, _p_of_t(difference / error, degrees))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for multiple comparisons by Holm's method.

    Reference: S. Holm, Scandinavian Journal of Statistics 6 (1979).
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def with_power(difference: PairedDifference, margin: float | None) -> PairedDifference:
    """Add the detectable difference and, with a `margin`, the p of TOST."""
    if difference.sd is None:
        return difference
    error = difference.sd / sqrt(difference.pairs)
    p = None if margin is None else equivalence_p(difference.mean, error, difference.pairs - 1, margin)
    return replace(difference, detectable=detectable(difference.sd, difference.pairs), p_equivalent=p)


def conclusion_word(difference: PairedDifference, better: str) -> Word:
    """Return the conclusion of the tests at 5%; a significant difference counts even if it is within the margin.

    Args:
        difference: with the p-values of both tests, corrected if there are several comparisons.
        better: the better direction of the metric: `lower`, `higher` or `neither`.
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
    """Return the p of an equivalence test (TOST): small if the true difference lies within ±`margin`.

    It is the larger p of two one-sided t tests, and below 5% if and only if the 90% interval lies within the margin.
    Reference: D. J. Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15 (1987).
    """
    from scipy.special import stdtr

    return float(stdtr(degrees_of_freedom, (abs(mean) - margin) / error))


def detectable(sd: float, pairs: int) -> float:
    """Return the true difference that a two-sided paired t test at 5% detects with 80% power.

    Args:
        sd: the true standard deviation of the differences.
        pairs: at least two.
    """
    return noncentrality(pairs - 1) * sd / sqrt(pairs)


@cache
def noncentrality(degrees_of_freedom: int) -> float:
    """Return the true mean, in standard errors, that a two-sided t test at 5% detects in 80% of studies.

    Reference: J. Cohen, Statistical Power Analysis for the Behavioral Sciences (1988), chapter 2.
    """
    from scipy.special import nctdtrinc

    critical = student_quantile(1 - ALPHA / 2, degrees_of_freedom)
    return float(nctdtrinc(degrees_of_freedom, 1 - POWER, critical))


def pairs_to_resolve(sd: float, margin: float) -> int:
    """Return the fewest pairs that detect a true difference of `margin` with 80% power, two-sided at 5%."""
    from scipy.special import ndtri

    pairs = max(2, int(((ndtri(1 - ALPHA / 2) + ndtri(POWER)) * sd / margin) ** 2))
    while noncentrality(pairs - 1) > margin / sd * sqrt(pairs):
        pairs += 1
    return pairs


def pairs_to_equate(sd: float, margin: float) -> int:
    """Return the fewest pairs with which TOST at 5% has 80% power if the true difference is 0."""
    from scipy.special import ndtri

    pairs = max(2, int(((ndtri(1 - ALPHA) + ndtri((1 + POWER) / 2)) * sd / margin) ** 2))
    while equivalence_power(margin, sd / sqrt(pairs), pairs - 1) < POWER:
        pairs += 1
    return pairs


def equivalence_power(margin: float, error: float, degrees_of_freedom: int, true: float = 0.0) -> float:
    """Return the probability that TOST at 5% finds equivalence within ±`margin`.

    It integrates over the distribution of the sample variance.
    Reference: K. F. Phillips, Journal of Pharmacokinetics and Biopharmaceutics 18 (1990).

    Args:
        margin: margin of equivalence.
        error: the true standard error of the mean.
        degrees_of_freedom: degrees of freedom of the sample variance.
        true: the true difference.
    """
    import numpy as np
    from scipy.special import gammaincinv, ndtr

    probabilities = (np.arange(MIDPOINTS) + 0.5) / MIDPOINTS
    errors = error * np.sqrt(gammaincinv(degrees_of_freedom / 2, probabilities) * 2 / degrees_of_freedom)
    reach = margin - student_quantile(1 - ALPHA, degrees_of_freedom) * errors
    chances = ndtr((reach - true) / error) - ndtr((-reach - true) / error)
    return float(np.where(reach > 0, chances, 0.0).mean())


def relative(logarithm: float) -> float:
    """Return exp(logarithm) - 1, the relative change; infinity if it overflows."""
    try:
        return expm1(logarithm)
    except OverflowError:
        return inf


def student_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Return the quantile of Student's t distribution."""
    from scipy.special import stdtrit  # importing scipy.stats takes 0.9 s

    return float(stdtrit(degrees_of_freedom, probability))


def _p_of_t(t: float, degrees_of_freedom: float) -> float:
    """Return the two-sided p-value of Student's t."""
    from scipy.special import stdtr

    return float(2 * stdtr(degrees_of_freedom, -abs(t)))


def _logarithms(values: Mapping[int, float]) -> dict[int, float]:
    _require_finite([*values.values()])
    if wrong := [value for value in values.values() if value <= 0]:
        raise ValueError(f"{wrong[0]} has no logarithm: ratios need positive values")
    return {seed: log(value) for seed, value in values.items()}


def _require_finite(values: Sequence[float]) -> None:
    """Raise `ValueError` for NaN and infinity, which would silently spoil every sum."""
    if wrong := [value for value in values if not isfinite(value)]:
        raise ValueError(f"statistics need finite numbers, got {wrong[0]}")
