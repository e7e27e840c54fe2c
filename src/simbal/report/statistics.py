"""Statistics of a few seeds: mean, standard deviation, and the difference of two arms with interval and tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import expm1, hypot, inf, isfinite, log, sqrt
from statistics import fmean
from typing import Literal

from simbal.report.documents import CONFIDENCE, OverDocuments

ROUNDING = 1e-12  # as a share of the largest value: values that differ by less differ by rounding alone
Scale = Literal["difference", "ln"]  # ln: of natural logarithms, so that exp of it is a ratio


@dataclass(frozen=True)
class Summary:
    """One metric over the seeds of one arm; a single seed has no standard deviation."""

    mean: float
    sd: float | None  # with n - 1 in the denominator
    n: int


@dataclass(frozen=True)
class Welch:
    """Treatment minus baseline over all seeds of both, by Welch's t test of unequal variances.

    Where neither arm varies there is no noise to test the difference against: both numbers of the test are None.
    """

    mean: float  # difference of the means
    degrees_of_freedom: float | None
    p: float | None  # two-sided


@dataclass(frozen=True)
class PairedDifference:
    """Treatment minus baseline over the seeds that both have; None is what needs more seeds than there are.

    Where all differences are the same, no noise was measured: there is neither an interval nor a test.
    """

    mean: float
    sd: float | None  # of the differences, with n - 1 in the denominator
    low: float | None  # lower end of Student's 95% interval
    high: float | None
    pairs: int
    p: float | None  # two-sided, of the paired t test
    effect: float | None  # Cohen's d_z, mean / sd of the differences
    welch: Welch | None
    scale: Scale = "difference"
    p_holm: float | None = None  # corrected for the arms that are compared; None of a single one
    detectable: float | None = None  # the true difference that so many pairs show with 80% power
    p_equivalent: float | None = None  # of TOST within the margin, corrected as p_holm is
    conclusion: str = "not resolved"
    over_documents: OverDocuments | None = None  # of a loss, or of the logarithm of a perplexity


def summarize(values: Sequence[float]) -> Summary | None:
    """Return mean, standard deviation and count; None of no values; `ValueError` for NaN and infinity."""
    if not values:
        return None
    _refuse_infinite(values)
    return Summary(fmean(values), standard_deviation(values) if len(values) > 1 else None, len(values))


def standard_deviation(values: Sequence[float]) -> float:
    """Return the standard deviation with n - 1 in the denominator, of two values or more."""
    shifted = [value - values[0] for value in values]  # of equal values exactly 0, which their mean may not be
    mean = fmean(shifted)
    return hypot(*(one - mean for one in shifted)) / sqrt(len(values) - 1)


def paired_difference(
    treatment: Mapping[int, float], baseline: Mapping[int, float], ratio: bool = False
) -> PairedDifference | None:
    """Return the mean difference over shared seeds with Student's 95% interval and tests; None if no seed is shared.

    The same seed gives the same data order and the same initial weights, so pairing removes what they add to the noise.
    Interval and tests assume that the differences are normal.

    Args:
        treatment: values by seed.
        baseline: values by seed.
        ratio: take the differences of natural logarithms; exp of their mean is the geometric mean of the ratios.

    Raises:
        ValueError: a value is NaN or infinite, or of a ratio not above 0.
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
    largest = max(largest, 1.0) if ratio else largest  # a logarithm is rounded as the number 1 is
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
    """Test by Welch's t test, with the degrees of freedom of Satterthwaite; None unless both arms have two seeds.

    Reference: B. L. Welch, Biometrika 34 (1947).

    Raises:
        ValueError: a value is NaN or infinite.
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
    """Return each p corrected for how many there are.

    The chance of one false finding among them stays below p.
    Reference: S. Holm, Scandinavian Journal of Statistics 6 (1979).

    Raises:
        ValueError: a p is not between 0 and 1, or NaN.
    """
    if wrong := [p for p in p_values if not 0 <= p <= 1]:
        raise ValueError(f"{wrong[0]} is no p: it lies between 0 and 1")
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def relative(logarithm: float) -> float:
    """Return exp of a logarithm, less 1: the change that a difference of logarithms is; infinity if it is too large."""
    try:
        return expm1(logarithm)
    except OverflowError:
        return inf


def student_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Return the quantile of Student's t distribution; `ValueError` outside probabilities of 0 to 1."""
    if not (0 < probability < 1 and 0 < degrees_of_freedom < inf):
        raise ValueError(f"no t distribution of {degrees_of_freedom} degrees of freedom has a {probability} quantile")
    from scipy.special import stdtrit  # scipy.stats has it too, for 0.9 s of imports

    return float(stdtrit(degrees_of_freedom, probability))


def _p_of_t(t: float, degrees_of_freedom: float) -> float:
    """Return the two-sided p of Student's t."""
    from scipy.special import stdtr

    return float(2 * stdtr(degrees_of_freedom, -abs(t)))


def _logarithms(values: Mapping[int, float]) -> dict[int, float]:
    """Return the natural logarithms by seed; `ValueError` for a value that has none."""
    _refuse_infinite([*values.values()])
    if wrong := [value for value in values.values() if value <= 0]:
        raise ValueError(f"{wrong[0]} has no logarithm: a ratio is taken of values above 0")
    return {seed: log(value) for seed, value in values.items()}


def _refuse_infinite(values: Sequence[float]) -> None:
    """Raise `ValueError` for NaN and infinity, which would pass through every sum."""
    if wrong := [value for value in values if not isfinite(value)]:
        raise ValueError(f"{wrong[0]} is among the values: statistics are of finite numbers")
