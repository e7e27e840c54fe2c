"""Error rates of the comparisons in a table, by simulation: python -m benchmarks.error_rates [STUDIES].

Prints the percentage of studies with at least one wrong conclusion: a difference between equal arms, or equivalence of
arms that differ by the margin. It applies the rules of `simbal.report.simultaneous`, vectorized over studies without
missing runs; a sample of the studies is also computed by the module itself and must agree.
Shapes: N studies, A arms (the baseline first), S seeds.
"""

import sys
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtrc, stdtrit

from simbal.report.largest_t import ALPHA, LargestT
from simbal.report.sequential import boundaries
from simbal.report.simultaneous import BASELINE_ALPHA, simultaneous_intervals

Array = NDArray[np.float64]
SD, MARGIN = 0.02, 0.026
CHECKED = 50  # studies of each scenario that the module computes too
ARMS, SEEDS = (2, 3, 5, 10, 40), (2, 3, 5, 10)
LOOKS = (5, 10, 15, 20, 25, 30, 35, 40)


@cache
def quantile(pairs: int, pooled: int, degrees: int, alpha: float) -> float:
    """Return the critical value for `pairs` comparisons; `pooled` of them share the noise."""
    return LargestT(pairs, correlation=0.5 if pooled > 1 else 0.0).quantile(degrees, alpha)


def intervals(values_NAS: Array, alpha: float = ALPHA) -> tuple[Array, Array]:
    """Return both ends of the simultaneous interval of each arm minus the baseline, (N, A - 1)."""
    _, arms, seeds = values_NAS.shape
    tests_baseline = arms > 3
    noisy_NA = _noisy(values_NAS, tests_baseline)
    differences_NAS = values_NAS[:, 1:] - values_NAS[:, :1]
    means_NA, sds_NA = differences_NAS.mean(2), differences_NAS.std(2, ddof=1)
    sidak = stdtrit(seeds - 1, (1 + (1 - alpha) ** (1 / (arms - 1))) / 2)
    half_NA = sidak * sds_NA / np.sqrt(seeds)
    square_N, own_NA = _squares(values_NAS, ~noisy_NA)
    counts_N = (~noisy_NA).sum(1)
    degrees_N = (counts_N - 1) * (seeds - 1)
    for study in np.flatnonzero((counts_N > 1) & ~noisy_NA[:, 0]):
        degrees = int(degrees_N[study])
        noise, pooled = np.sqrt(square_N[study] / degrees), int(counts_N[study]) - 1
        half = quantile(arms - 1, pooled, degrees, alpha) * noise
        if tests_baseline and (own := _with_baseline(square_N[study], own_NA[study, 0], pooled, seeds)):
            half = max(half, quantile(arms - 1, pooled, own[1], alpha) * own[0])
        half_NA[study, ~noisy_NA[study, 1:]] = half * np.sqrt(2 / seeds)
    return means_NA - half_NA, means_NA + half_NA


def _with_baseline(square: float, own_square: float, others: int, seeds: int) -> tuple[float, int] | None:
    """Return the noise and its degrees of freedom if the baseline is noisier than the other arms."""
    own_degrees, left = seeds - 1, (others - 1) * (seeds - 1)
    if not left:
        return None
    own, rest = own_square / own_degrees, (square - own_square) / left
    if fdtrc(own_degrees, left, own / rest) >= BASELINE_ALPHA:
        return None
    own, rest = own * (1 + 1 / others), rest * (1 - 1 / others)
    return np.sqrt((own + rest) / 2), max(1, int((own + rest) ** 2 / (own**2 / own_degrees + rest**2 / left)))


def _noisy(values_NAS: Array, tests_baseline: bool) -> NDArray[np.bool_]:
    """Return which arms are set aside, (N, A)."""
    studies, arms, seeds = values_NAS.shape
    active_NA = np.ones((studies, arms), bool)
    active_NA[:, 0] = not tests_baseline
    tested = int(active_NA[0].sum())
    going_N = np.full(studies, tested > 2)
    while going_N.any():
        square_N, own_NA = _squares(values_NAS, active_NA)
        counts_N = active_NA.sum(1)
        left_N = (counts_N - 2) * (seeds - 1)
        rest_NA = np.maximum(square_N[:, None] - own_NA, 1e-300) / np.maximum(left_N, 1)[:, None]
        p_NA = np.where(active_NA, fdtrc(seeds - 1, np.maximum(left_N, 1)[:, None], own_NA / (seeds - 1) / rest_NA), 2)
        noisiest_N = p_NA.argmin(1)
        going_N &= (p_NA.min(1) * counts_N < ALPHA) & (counts_N > 2)
        active_NA[going_N, noisiest_N[going_N]] = False
    noisy_NA = ~active_NA
    if tests_baseline:
        noisy_NA[:, 0] = False
    none_common_N = noisy_NA.sum(1) > max(1, tested // 4)
    noisy_NA[none_common_N, 1 if tests_baseline else 0 :] = True
    return noisy_NA


def _squares(values_NAS: Array, active_NA: NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return the sum of squared residuals of the active arms, and how much it shrinks without each arm."""
    weight_NA1 = active_NA[:, :, None].astype(float)
    centered_NAS = values_NAS - values_NAS.mean(2, keepdims=True)
    counts_N11 = np.maximum(weight_NA1.sum(1, keepdims=True), 1)
    residual_NAS = (centered_NAS - (centered_NAS * weight_NA1).sum(1, keepdims=True) / counts_N11) * weight_NA1
    own_NA = (residual_NAS**2).sum(2)
    return own_NA.sum(1), own_NA * (counts_N11 / np.maximum(counts_N11 - 1, 1))[:, 0]


def check_against_module(values_NAS: Array) -> None:
    """Raise `AssertionError` if the module gives other intervals."""
    low_NA, high_NA = intervals(values_NAS)
    for study, values_AS in enumerate(values_NAS):
        cells = {str(arm): dict(enumerate(row)) for arm, row in enumerate(values_AS.tolist())}
        pairs = [(arm, "0") for arm in cells if arm != "0"]
        found = simultaneous_intervals(cells, pairs)
        ends = [(found[pair].mean - found[pair].half, found[pair].mean + found[pair].half) for pair in pairs]
        expected = [*zip(low_NA[study], high_NA[study], strict=True)]
        np.testing.assert_allclose(ends, expected, rtol=1e-6, atol=1e-9)


def gaussian(sds: Callable[[int], Array]) -> Callable[..., Array]:
    """Return a generator of normal noise with these standard deviations of the arms, in units of SD."""

    def draw(rng: np.random.Generator, studies: int, arms: int, seeds: int) -> Array:
        noise_NAS: Array = SD * sds(arms)[:, None] * rng.standard_normal((studies, arms, seeds))
        return noise_NAS

    return draw


def heavy_tails(rng: np.random.Generator, studies: int, arms: int, seeds: int) -> Array:
    """Return noise with Student's distribution with four degrees of freedom and standard deviation SD."""
    noise_NAS: Array = SD / np.sqrt(2) * rng.standard_t(4, (studies, arms, seeds))
    return noise_NAS


def one_arm(arm: int, factor: float) -> Callable[[int], Array]:
    """Return standard deviations of 1, but `factor` for one arm."""
    return lambda arms: np.where(np.arange(arms) == arm, factor, 1.0)


SCENARIOS = {
    "equal noise": gaussian(np.ones),
    "noise from 1x to 2x": gaussian(lambda arms: np.roll(np.linspace(1, 2, arms), (arms + 1) // 2)),
    "baseline 2x": gaussian(one_arm(0, 2)),
    "baseline 5x": gaussian(one_arm(0, 5)),
    "one arm 5x": gaussian(one_arm(1, 5)),
    "heavy tails (t, 4 df)": heavy_tails,
}


def wrong_percent(name: str, studies: int, arms: int, seeds: int, true: float = 0.0) -> float:
    """Return the percentage of studies with a wrong conclusion, if all arms differ from the baseline by `true`."""
    rng = np.random.default_rng([*name.encode(), arms, seeds])
    values_NAS = SCENARIOS[name](rng, studies, arms, seeds)
    values_NAS[:, 1:] += true
    check_against_module(values_NAS[:CHECKED])
    low_NA, high_NA = intervals(values_NAS)
    wrong_NA = (low_NA > 0) | (high_NA < 0) if true == 0 else (low_NA > -MARGIN) & (high_NA < MARGIN)
    return 100 * float(wrong_NA.any(1).mean())


def wrong_percent_with_looks(name: str, studies: int, arms: int, true: float = 0.0) -> tuple[float, float]:
    """Return the percentage of studies with a wrong conclusion when they stop, and their mean number of seeds.

    A study stops at the first look at which every arm has a conclusion (`until=decided`).
    """
    rng = np.random.default_rng([*name.encode(), arms])
    values_NAS = SCENARIOS[name](rng, studies, arms, LOOKS[-1])
    values_NAS[:, 1:] += true
    wrong_N, seeds_N, going_N = np.zeros(studies, bool), np.zeros(studies), np.ones(studies, bool)
    for look, level in zip(LOOKS, boundaries(LOOKS, LOOKS[-1]), strict=True):
        low_NA, high_NA = intervals(values_NAS[:, :, :look], level)
        different_NA = (low_NA > 0) | (high_NA < 0)
        equivalent_NA = (low_NA > -MARGIN) & (high_NA < MARGIN) & ~different_NA
        stops_N = going_N & ((different_NA | equivalent_NA).all(1) | (look == LOOKS[-1]))
        wrong_N[stops_N] = (equivalent_NA if true else different_NA)[stops_N].any(1)
        seeds_N[stops_N] = look
        going_N &= ~stops_N
    return 100 * float(wrong_N.mean()), float(seeds_N.mean())


def main(studies: int) -> None:
    """Print all tables."""
    print(f"{studies:,} studies each; wrong conclusions in percent of the studies\n")
    print("| noise | seeds |", *(f"{arms} arms |" for arms in ARMS), "\n|---|---|" + "---|" * len(ARMS))
    for name in SCENARIOS:
        for seeds in SEEDS:
            rates = [wrong_percent(name, studies, arms, seeds) for arms in ARMS]
            print(f"| {name} | {seeds} |", *(f"{rate:.1f} |" for rate in rates), flush=True)
    for seeds in SEEDS:
        rates = [wrong_percent("equal noise", studies, arms, seeds, MARGIN) for arms in ARMS]
        print(f"| equivalent at the margin | {seeds} |", *(f"{rate:.1f} |" for rate in rates), flush=True)
    print("\n| until=decided, looks at 5, 10, ..., 40 seeds | 2 arms | 5 arms | 10 arms |\n|---|---|---|---|")
    cases = [(name, 0.0) for name in SCENARIOS] + [("equal noise", MARGIN), ("baseline 2x", MARGIN)]
    for name, true in cases:
        found = [wrong_percent_with_looks(name, studies, arms, true) for arms in (2, 5, 10)]
        title = f"{name}, true difference at the margin" if true else name
        print(f"| {title} |", *(f"{rate:.1f} ({seeds:.0f} seeds) |" for rate, seeds in found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
