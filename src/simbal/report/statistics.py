"""Statistics of a few seeds: mean, standard deviation, and the difference of two arms with interval and tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import fmean, stdev

CONFIDENCE = 0.95
ROUNDING = 1e-12  # as a share of the largest value: values that differ by less differ by rounding alone


@dataclass(frozen=True)
class Summary:
    """One metric over the seeds of one arm; a single seed has no standard deviation."""

    mean: float
    sd: float | None  # with n - 1 in the denominator
    n: int


@dataclass(frozen=True)
class Welch:
    """Treatment minus baseline over all seeds of both, by Welch's t test of unequal variances."""

    mean: float  # difference of the means
    degrees_of_freedom: float | None  # None: neither arm varies
    p: float  # two-sided


@dataclass(frozen=True)
class PairedDifference:
    """Treatment minus baseline over the seeds that both have; None is what needs more seeds than there are."""

    mean: float
    low: float | None  # lower end of Student's 95% interval
    high: float | None
    pairs: int
    p: float | None  # two-sided, of the paired t test; 0 or 1 where all differences are the same
    effect: float | None  # Cohen's d_z, mean / sd of the differences; None also where all of them are the same
    welch: Welch | None
    p_holm: float | None = None  # corrected for the arms that are compared; None of a single one


def summarize(values: Sequence[float]) -> Summary | None:
    """Return mean, standard deviation and count; None of no values."""
    if not values:
        return None
    return Summary(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def paired_difference(treatment: Mapping[int, float], baseline: Mapping[int, float]) -> PairedDifference | None:
    """Return the mean difference over shared seeds with Student's 95% interval and tests; None if no seed is shared.

    The same seed gives the same data order and the same initial weights, so pairing removes what they add to the noise.
    Interval and tests assume that the differences are normal.

    Args:
        treatment: values by seed.
        baseline: values by seed.
    """
    shared = sorted(treatment.keys() & baseline)
    differences = summarize([treatment[seed] - baseline[seed] for seed in shared])
    if differences is None:
        return None
    welch = welch_test([*treatment.values()], [*baseline.values()])
    low, high = interval(differences)
    if differences.sd is None:
        return PairedDifference(differences.mean, low, high, 1, None, None, welch)
    largest = max(abs(values[seed]) for values in (treatment, baseline) for seed in shared)
    p = _p_of_t(differences.mean, differences.sd / sqrt(differences.n), differences.n - 1, largest)
    effect = None if differences.sd <= ROUNDING * largest else differences.mean / differences.sd
    return PairedDifference(differences.mean, low, high, differences.n, p, effect, welch)


def interval(summary: Summary) -> tuple[float | None, float | None]:
    """Return Student's 95% interval of a mean; (None, None) for a single value."""
    if summary.sd is None:
        return None, None
    half = student_quantile(0.5 + CONFIDENCE / 2, summary.n - 1) * summary.sd / sqrt(summary.n)
    return summary.mean - half, summary.mean + half


def welch_test(treatment: Sequence[float], baseline: Sequence[float]) -> Welch | None:
    """Test by Welch's t test, with the degrees of freedom of Satterthwaite; None unless both arms have two seeds.

    Reference: B. L. Welch, Biometrika 34 (1947).
    """
    ours, theirs = summarize(treatment), summarize(baseline)
    if ours is None or theirs is None or ours.sd is None or theirs.sd is None:
        return None
    difference = ours.mean - theirs.mean
    errors = ours.sd / sqrt(ours.n), theirs.sd / sqrt(theirs.n)
    error, largest = hypot(*errors), max(map(abs, [*treatment, *baseline]))
    if error <= ROUNDING * largest:
        return Welch(difference, None, _p_of_t(difference, error, 1, largest))
    share = (errors[0] / error) ** 2
    degrees = 1 / (share**2 / (ours.n - 1) + (1 - share) ** 2 / (theirs.n - 1))
    return Welch(difference, degrees, _p_of_t(difference, error, degrees, largest))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return each p corrected for how many there are.

    The chance of one false finding among them stays below p.
    Reference: S. Holm, Scandinavian Journal of Statistics 6 (1979).
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def student_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Return the quantile of Student's t distribution."""
    from scipy.special import stdtrit  # scipy.stats has it too, for 0.9 s of imports

    return float(stdtrit(degrees_of_freedom, probability))


def _p_of_t(mean: float, error: float, degrees_of_freedom: float, largest: float) -> float:
    """Return the two-sided p of `mean`, which has the standard error `error`.

    An error of 0 gives the limit: 1 for a mean of 0, else 0.
    """
    from scipy.special import stdtr

    if error <= ROUNDING * largest:
        return 1.0 if abs(mean) <= ROUNDING * largest else 0.0
    return float(2 * stdtr(degrees_of_freedom, -abs(mean) / error))
