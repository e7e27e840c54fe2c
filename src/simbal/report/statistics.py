"""Statistics over a few seeds: means, standard deviations and single tests of two arms.

The intervals and words of a table come from `simbal.report.simultaneous`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import expm1, hypot, inf, isfinite, log, sqrt
from statistics import fmean, stdev
from typing import Any, Literal

from simbal.report.bootstrap import CONFIDENCE, OverDocuments
from simbal.report.largest_t import LargestT

ROUNDING = 1e-12  # relative to the largest value: smaller differences are rounding errors
Scale = Literal["difference", "ln"]  # ln: differences of natural logarithms, so that exp of one is a ratio
UNRESOLVED, IDENTICAL = "not resolved", "identical"
NO_CONCLUSION = ""  # of runs that are not trained


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
class Difference:
    """Treatment minus baseline on their shared seeds. Numbers that need more seeds or noise are None."""

    mean: float
    pairs: int
    sd: float | None  # of the paired differences, with n - 1 in the denominator
    effect: float | None  # Cohen's d_z: mean / sd
    p_paired: float | None  # of the paired t test for this comparison alone, two-sided
    welch: Welch | None
    scale: Scale = "difference"
    low: float | None = None  # lower end of the simultaneous 95% interval
    high: float | None = None
    error: float | None = None  # standard error
    degrees: float | None = None  # degrees of freedom of the error
    p: float | None = None  # adjusted for the number of comparisons, like the interval
    detectable: float | None = None  # the true difference that is detected with 80% power
    largest: LargestT | None = None  # gives the critical value of the interval
    pooled: bool | None = None  # whether its noise comes from all arms with the same baseline
    conclusion: str = UNRESOLVED
    over_documents: OverDocuments | None = None  # of a loss, or of the logarithm of a perplexity

    def numbers(self) -> dict[str, Any]:
        """Return the entry of table.json: all fields but `largest`."""
        return {name: value for name, value in asdict(self).items() if name != "largest"}


def summarize(values: Sequence[float]) -> Summary | None:
    """Return mean, standard deviation and count, or None for no values; `ValueError` for NaN and infinity."""
    _require_finite(values)
    return Summary(fmean(values), stdev(values) if len(values) > 1 else None, len(values)) if values else None


def paired_difference(
    treatment: Mapping[int, float], baseline: Mapping[int, float], scale: Scale = "difference"
) -> Difference | None:
    """Compare two arms on their shared seeds by a paired t test; None if they share no seed.

    A seed fixes the data order and the initial weights, so pairing removes their noise.

    Args:
        treatment: finite values by seed, on the given scale.
        baseline: finite values by seed.
        scale: the scale of the values.
    """
    shared = sorted(treatment.keys() & baseline)
    differences = summarize([treatment[seed] - baseline[seed] for seed in shared])
    if differences is None:
        return None
    welch = welch_test([*treatment.values()], [*baseline.values()])
    largest = max(abs(values[seed]) for values in (treatment, baseline) for seed in shared)
    if differences.sd is None or differences.sd <= ROUNDING * max(largest, 1.0 if scale == "ln" else 0.0):
        return Difference(differences.mean, differences.n, None, None, None, welch, scale)
    t = differences.mean / (differences.sd / sqrt(differences.n))
    effect, p = differences.mean / differences.sd, _p_of_t(t, differences.n - 1)
    return Difference(differences.mean, differences.n, differences.sd, effect, p, welch, scale)


def logarithms(values: Mapping[int, float]) -> dict[int, float]:
    """Return the natural logarithms; `ValueError` for a value that has none."""
    _require_finite([*values.values()])
    if wrong := [value for value in values.values() if value <= 0]:
        raise ValueError(f"{wrong[0]} has no logarithm: ratios need positive values")
    return {seed: log(value) for seed, value in values.items()}


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


def _require_finite(values: Sequence[float]) -> None:
    """Raise `ValueError` for NaN and infinity, which would silently spoil every sum."""
    if wrong := [value for value in values if not isfinite(value)]:
        raise ValueError(f"statistics need finite numbers, got {wrong[0]}")
