"""Simultaneous confidence intervals for differences between arms that share their seeds.

A value is modeled as arm + seed + noise, where the noise has the same standard deviation in all arms that are compared
with each other. It is estimated from the residuals of these arms together, with (A - 1)(S - 1) degrees of freedom if no
run is missing. A paired t test has only S - 1. All intervals of a metric together contain all true differences with
probability 95%. For a single pair of arms the interval is Student's paired interval.

Groups of arms with different baselines, such as two corpora, share neither seed effects nor noise. Arms that are too
noisy to pool are set aside and keep their own paired intervals. A noisy baseline is in every comparison, so it gets its
own variance instead.

References: Y. Hochberg, J. Multivariate Analysis 4 (1974), for any set of comparisons (correlation 0 below);
    T. S. Russell and R. A. Bradley, Biometrika 45 (1958), for the noise of one arm; F. E. Satterthwaite, Biometrics
    Bulletin 2 (1946), for the degrees of freedom of a sum of variances.
Shapes: A arms, S seeds, C cells (runs), P parameters, K comparisons, T nodes of integrals.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import inf, sqrt

import numpy as np
from scipy.special import fdtrc, nctdtrinc, ndtr

from simbal.report.largest_t import ALPHA, LargestT, noise_nodes

POWER = 0.8
ROUNDING = 1e-12  # smaller residuals, relative to the largest value, and sums, to their terms, are rounding errors
BASELINE_ALPHA = 0.1  # of the test for a noisy baseline; not corrected, because it is in all comparisons

Cells = Mapping[str, Mapping[int, float]]  # value by arm and seed; a failed run is absent
Pair = tuple[str, str]  # treatment and the arm that it is compared with


@dataclass(frozen=True)
class Interval:
    """A difference between two arms with its simultaneous interval."""

    mean: float
    error: float  # standard error
    degrees: float  # degrees of freedom of the error
    largest: LargestT
    alpha: float  # the probability that one or more intervals of the table miss the true difference

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return self.largest.quantile(self.degrees, self.alpha) * self.error

    @property
    def p(self) -> float:
        """The adjusted two-sided p: below alpha if and only if the interval excludes 0."""
        return max(0.0, 1 - self.largest.probability(abs(self.mean) / self.error, self.degrees))

    @property
    def detectable(self) -> float:
        """The true difference that is detected with 80% power."""
        return detectable_difference(self.largest.quantile(self.degrees, self.alpha), self.degrees, self.error)

    @property
    def pooled(self) -> bool:
        """Whether several arms share the noise. If not, it comes from the paired differences of these two arms."""
        return self.largest.kind != "separate"


def simultaneous_intervals(
    cells: Cells, pairs: Sequence[Pair], all_pairs: bool = False, alpha: float = ALPHA
) -> dict[Pair, Interval]:
    """Return the interval of each pair that has measured noise and shares at least two seeds.

    Args:
        cells: finite values by arm and seed.
        pairs: all comparisons of the table.
        all_pairs: `pairs` are all pairs of arms.
        alpha: the probability that one or more intervals miss the true difference.
    """
    pairs = [(arm, other) for arm, other in pairs if len(cells[arm].keys() & cells[other].keys()) > 1]
    found: dict[Pair, Interval] = {}
    for arms in _connected(pairs):
        own = [pair for pair in pairs if pair[0] in arms]
        for pair, interval in _intervals_of_group({arm: cells[arm] for arm in arms}, own, all_pairs, alpha).items():
            found[pair] = replace(interval, largest=replace(interval.largest, share=len(own) / len(pairs)))
    return found


def _intervals_of_group(cells: Cells, pairs: Sequence[Pair], all_pairs: bool, alpha: float) -> dict[Pair, Interval]:
    """Return the simultaneous intervals of arms that share seed effects and, except for noisy arms, the noise."""
    baselines = {other for _, other in pairs}
    baseline = None
    if len(baselines) == 1 and len(pairs) > 2 and not all_pairs:
        (baseline,) = baselines
    layout = _Layout(cells)
    noisy = _noisy_arms(layout, baseline)
    pooled = [pair for pair in pairs if not noisy & {*pair}]
    intervals = _pooled_intervals(layout.without(noisy), pooled, len(pairs), all_pairs, baseline, alpha)
    for pair in pairs:
        if pair not in intervals and (own := _own_interval(cells, pair, len(pairs), alpha)):
            intervals[pair] = own
    return intervals


def _noisy_arms(layout: _Layout, baseline: str | None) -> set[str]:
    """Return the arms whose noise exceeds the noise of the others, by F tests with Bonferroni's correction.

    The noisiest arm is set aside first and the test is repeated. If more than a quarter of the arms (and more than
    one) would be set aside, the arms have no common noise, and all are returned. Means have no influence. A noisy
    baseline is treated elsewhere.
    """
    layout = layout.without({baseline})
    everything = layout.arms
    noisy: set[str] = set()
    while len(layout.arms) > 2:
        p_of = {arm: _noise_p(*layout.noise_of(arm)) for arm in layout.arms}
        noisiest = min(p_of, key=p_of.__getitem__)
        if p_of[noisiest] * len(layout.arms) >= ALPHA:
            break
        noisy.add(noisiest)
        layout = layout.without({noisiest})
    most = max(1, len(everything) // 4)
    return noisy if len(noisy) <= most else {*everything}


def _noise_p(own_square: float, own_degrees: int, rest_square: float, rest_degrees: int) -> float:
    """Return the p of an F test that an arm is noisier than the rest: 1 without a test, 0 if only this arm varies."""
    if not own_degrees or not rest_degrees or not own_square:
        return 1.0
    ratio = own_square / own_degrees / (rest_square / rest_degrees) if rest_square else inf
    return float(fdtrc(own_degrees, rest_degrees, ratio))


def detectable_difference(critical: float, degrees: float, error: float) -> float:
    """Return the true difference for which |t| exceeds `critical` with 80% power.

    Args:
        critical: two-sided critical value.
        degrees: degrees of freedom of the noise.
        error: standard error of the difference.
    """
    return float(nctdtrinc(degrees, 1 - POWER, critical) * error)


def seeds_to_resolve(interval: Interval, seeds: int, margin: float) -> int:
    """Return the fewest seeds with which a true difference of `margin` is detected with 80% power.

    The estimated noise is taken as the true noise.

    Args:
        interval: a comparison over `seeds` seeds.
        seeds: at least two.
        margin: in the unit of the difference.
    """
    return _fewest_seeds(lambda needed: _with_seeds(interval, seeds, needed).detectable <= margin)


def seeds_to_equate(interval: Interval, seeds: int, margin: float) -> int:
    """Return the fewest seeds whose interval lies within ±`margin` with 80% power if there is no difference."""
    return _fewest_seeds(lambda needed: equivalence_power(_with_seeds(interval, seeds, needed), margin) >= POWER)


def equivalence_power(interval: Interval, margin: float, true: float = 0.0) -> float:
    """Return the probability that an interval with this true error lies within ±`margin`, given the true difference.

    Reference: K. F. Phillips, Journal of Pharmacokinetics and Biopharmaceutics 18 (1990).
    """
    noise_T, weight_T = noise_nodes(interval.degrees)
    reach_T = margin - interval.half * noise_T
    chance_T = ndtr((reach_T - true) / interval.error) - ndtr((-reach_T - true) / interval.error)
    return float(weight_T @ np.where(reach_T > 0, chance_T, 0.0))


def _with_seeds(interval: Interval, seeds: int, needed: int) -> Interval:
    """Return the interval that `needed` seeds would give with the same noise."""
    degrees = interval.degrees * (needed - 1) / (seeds - 1)
    return replace(interval, error=interval.error * sqrt(seeds / needed), degrees=degrees)


def _fewest_seeds(suffices: Callable[[int], bool]) -> int:
    """Return the smallest number of seeds, at least two, that suffices."""
    high = 2
    while not suffices(high):
        high *= 2
    return bisect_left(range(high), True, lo=2, key=suffices)


class _Layout:
    """Least-squares fit of value = arm + seed to arms that share their seeds."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells
        self.arms = [*cells]
        seeds = sorted({seed for values in cells.values() for seed in values})
        self.arm_C = np.array([place for place, arm in enumerate(cells) for _ in cells[arm]], dtype=int)
        seed_C = np.array([seeds.index(seed) for values in cells.values() for seed in values], dtype=int)
        values_C = np.array([value for values in cells.values() for value in values.values()])
        self.design_CP = np.zeros((len(values_C), len(self.arms) + len(seeds)))
        self.design_CP[np.arange(len(values_C)), self.arm_C] = 1.0
        self.design_CP[np.arange(len(values_C)), len(self.arms) + seed_C] = 1.0
        center = values_C.mean() if values_C.size else 0.0
        self.covariance_PP = np.linalg.pinv(self.design_CP.T @ self.design_CP)
        self.effects_P = self.covariance_PP @ (self.design_CP.T @ (values_C - center))
        self.residual_C = values_C - center - self.design_CP @ self.effects_P
        rounding = 10 * ROUNDING * np.abs(values_C).max(initial=0.0)
        if np.abs(self.residual_C).max(initial=0.0) <= rounding:
            self.residual_C = np.zeros_like(self.residual_C)
        self.square = float(self.residual_C @ self.residual_C)
        self.degrees = len(values_C) - int(np.linalg.matrix_rank(self.design_CP)) if values_C.size else 0

    def without(self, arms: Set[str | None]) -> _Layout:
        """Return the fit to the other arms."""
        if not arms & {*self.arms}:
            return self
        return _Layout({arm: values for arm, values in self.cells.items() if arm not in arms})

    def noise_of(self, arm: str) -> tuple[float, int, float, int]:
        """Return how much the sum of squares and the degrees of freedom shrink without this arm, and what is left."""
        own_C = self.arm_C == self.arms.index(arm)
        own_design_CP, own_residual_C = self.design_CP[own_C], self.residual_C[own_C]
        free_CC = np.eye(len(own_design_CP)) - own_design_CP @ self.covariance_PP @ own_design_CP.T
        square = float(own_residual_C @ np.linalg.pinv(free_CC, rcond=1e-9) @ own_residual_C)
        degrees = int(np.linalg.matrix_rank(free_CC, tol=1e-9))
        rest = self.square - square
        return square, degrees, rest if rest > ROUNDING * square else 0.0, self.degrees - degrees


def _pooled_intervals(
    layout: _Layout, pairs: Sequence[Pair], count: int, all_pairs: bool, baseline: str | None, alpha: float
) -> dict[Pair, Interval]:
    """Return the intervals from the common noise. `count` includes the comparisons of the arms that were set aside."""
    if not pairs or not layout.degrees or layout.square <= 0:
        return {}
    contrast_KP = np.zeros((len(pairs), layout.design_CP.shape[1]))
    for row_P, (arm, other) in zip(contrast_KP, pairs, strict=True):
        row_P[layout.arms.index(arm)], row_P[layout.arms.index(other)] = 1.0, -1.0
    covariance_KK = contrast_KP @ layout.covariance_PP @ contrast_KP.T  # in units of the noise variance
    scale_K = np.sqrt(np.diag(covariance_KK))
    if all_pairs and len(pairs) == count:
        largest = LargestT(len(layout.arms), "pairs")
    else:
        correlation = float((covariance_KK / np.outer(scale_K, scale_K)).min()) if len(pairs) > 1 else 0.0
        largest = LargestT(count, correlation=round(max(0.0, correlation), 6))
    noise, freedom = sqrt(layout.square / layout.degrees), layout.degrees
    if baseline and (own := _noise_with_baseline(layout, baseline)):
        own_noise, own_freedom = own
        if largest.quantile(own_freedom, alpha) * own_noise > largest.quantile(freedom, alpha) * noise:
            noise, freedom = own
    means, errors = (contrast_KP @ layout.effects_P).tolist(), (noise * scale_K).tolist()
    return {
        pair: Interval(mean, error, freedom, largest, alpha)
        for pair, mean, error in zip(pairs, means, errors, strict=True)
    }


def _noise_with_baseline(layout: _Layout, baseline: str) -> tuple[float, int] | None:
    """Return the noise of a value, averaged over baseline and treatment, with its degrees of freedom.

    None if the baseline is not significantly noisier than the other arms.
    """
    own_square, own_degrees, rest_square, rest_degrees = layout.noise_of(baseline)
    if _noise_p(own_square, own_degrees, rest_square, rest_degrees) >= BASELINE_ALPHA:
        return None
    own, rest = own_square / own_degrees, rest_square / rest_degrees
    others = len(layout.arms) - 1
    own, rest = own * (1 + 1 / others), rest * (1 - 1 / others)  # independent; their sum is the sum of both variances
    freedom = (own + rest) ** 2 / (own**2 / own_degrees + rest**2 / rest_degrees)
    return sqrt((own + rest) / 2), max(1, int(freedom))


def _own_interval(cells: Cells, pair: Pair, count: int, alpha: float) -> Interval | None:
    """Return Student's paired interval with Sidak's correction; None if the differences do not vary."""
    ours, theirs = (cells[arm] for arm in pair)
    differences_S = np.array([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])
    sd = float(differences_S.std(ddof=1))
    if sd <= ROUNDING * max(abs(value) for value in [*ours.values(), *theirs.values()]):
        return None
    error, mean = sd / sqrt(len(differences_S)), float(differences_S.mean())
    return Interval(mean, error, len(differences_S) - 1, LargestT(count, "separate"), alpha)


def _connected(pairs: Sequence[Pair]) -> list[list[str]]:
    """Return the arms in groups that are connected by comparisons, in order of appearance."""
    groups: list[dict[str, None]] = []
    for pair in pairs:
        joined = dict.fromkeys(reversed(pair))
        for group in [group for group in groups if group.keys() & joined]:
            groups.remove(group)
            joined = group | joined
        groups.append(joined)
    return [[*group] for group in groups]
