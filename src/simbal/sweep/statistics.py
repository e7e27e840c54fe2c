"""What a few seeds say: mean, standard deviation, and the paired difference of two arms with its interval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Summary:
    """One metric over the seeds of one arm; a single seed has no standard deviation."""

    mean: float
    sd: float | None  # with n - 1 in the denominator
    n: int


@dataclass(frozen=True)
class PairedDifference:
    """Treatment minus baseline over the seeds that both have; a single pair has no interval."""

    mean: float
    low: float | None
    high: float | None
    pairs: int


def summarize(values: Sequence[float]) -> Summary | None:
    """Mean, standard deviation and count; None of no values."""
    if not values:
        return None
    return Summary(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def paired_difference(treatment: Mapping[int, float], baseline: Mapping[int, float]) -> PairedDifference | None:
    """Mean difference over shared seeds with Student's 95% interval; None if no seed is shared.

    The same seed gives the same data order and the same initial weights, so pairing removes what they add to the
    noise. The interval assumes that the differences are normal.

    Args:
        treatment: values by seed.
        baseline: values by seed.
    """
    differences = summarize([treatment[seed] - baseline[seed] for seed in sorted(treatment.keys() & baseline)])
    if differences is None:
        return None
    if differences.sd is None:
        return PairedDifference(differences.mean, None, None, 1)
    half = student_quantile(0.5 + CONFIDENCE / 2, differences.n - 1) * differences.sd / sqrt(differences.n)
    return PairedDifference(differences.mean, differences.mean - half, differences.mean + half, differences.n)


def student_quantile(probability: float, degrees_of_freedom: float) -> float:
    """The quantile of Student's t distribution."""
    from scipy.special import stdtrit  # scipy.stats has it too, for 0.9 s of imports

    return float(stdtrit(degrees_of_freedom, probability))
