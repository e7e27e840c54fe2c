"""Group-sequential testing of paired seeds: test after every few seeds with a total error of 5%.

Testing at 5% after every few seeds and stopping at the first significant result would find a difference between equal
arms in far more than 5% of studies. Instead, the plan spends the error step by step: each look has its own error rate,
strict at first and close to alpha at the end. The simultaneous intervals of a look use this rate.

The boundaries come from normal statistics and are applied to t statistics (the significance-level approach). With few
seeds this is an approximation; benchmarks/error_rates.py simulates it.

References: K. K. G. Lan and D. L. DeMets, Biometrika 70 (1983), for the spending; P. Armitage, C. K. McPherson and
    B. C. Rowe, Journal of the Royal Statistical Society A 132 (1969), for the recursion; C. Jennison and
    B. W. Turnbull, Group Sequential Methods (2000), sections 3.3, 7.2 and 11, for t statistics.
Shapes: G points of a grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import sqrt
from typing import TYPE_CHECKING

from simbal.report.largest_t import ALPHA

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

POINTS = 501  # of a grid; odd, as Simpson's rule needs
FARTHEST = 9.0  # standard deviations; the tail probability is below 1e-18
BISECTIONS = 60


def boundaries(looks: Sequence[int], most: int, alpha: float = ALPHA) -> list[float]:
    """Return the largest two-sided p that stops the study at each look, with O'Brien-Fleming-type spending.

    Args:
        looks: the number of pairs at each look, increasing from 2 or more to `most` or fewer.
        most: the number of pairs in the full plan.
        alpha: two-sided error of the full plan.
    """
    return [*_boundaries(tuple(look / most for look in looks), alpha)]


def spent_error(fraction: float, alpha: float) -> float:
    """Return the two-sided error that may be spent once a fraction of the pairs is available.

    It is the O'Brien-Fleming-type function of Lan and DeMets for each side: 2 - 2 Phi(z / sqrt(fraction)), where z is
    the upper quantile of alpha / 4.
    """
    from scipy.special import ndtr, ndtri

    return float(4 * ndtr(ndtri(alpha / 4) / sqrt(fraction)))


@cache
def _boundaries(fractions: tuple[float, ...], alpha: float) -> tuple[float, ...]:
    """Return the p of each look from the distribution of a Brownian motion that no earlier look has stopped."""
    import numpy as np
    from scipy.special import ndtr

    nominal: list[float] = []
    before = 0.0
    grid_G, mass_G = np.zeros(1), np.ones(1)  # the motion starts at 0
    for fraction in fractions:
        step = sqrt(fraction - before)
        error = spent_error(fraction, alpha) - (spent_error(before, alpha) if before else 0.0)
        z = _boundary(grid_G, mass_G, step, sqrt(fraction), error)
        nominal.append(float(2 * ndtr(-z)))
        grid_G, mass_G = _advance(grid_G, mass_G, step, min(z, FARTHEST) * sqrt(fraction))
        before = fraction
    return tuple(nominal)


def _boundary(
    grid_G: NDArray[np.float64], mass_G: NDArray[np.float64], step: float, scale: float, error: float
) -> float:
    """Find by bisection the z that the motion exceeds on either side, one step later, with probability `error`."""
    from scipy.special import ndtr

    low, high = 0.0, 40.0  # beyond 38 the normal tail is 0 in float64
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        beyond_G = ndtr((grid_G - middle * scale) / step) + ndtr((-grid_G - middle * scale) / step)
        low, high = (middle, high) if float(beyond_G @ mass_G) > error else (low, middle)
    return high


def _advance(
    grid_G: NDArray[np.float64], mass_G: NDArray[np.float64], step: float, edge: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a new grid between the boundaries, and the probability that the motion continues near each point."""
    import numpy as np

    points_G = np.linspace(-edge, edge, POINTS)
    simpson_G = np.where(np.arange(POINTS) % 2, 4.0, 2.0) * (2 * edge / (POINTS - 1) / 3)
    simpson_G[[0, -1]] /= 2
    density = np.exp(-(((points_G[:, None] - grid_G) / step) ** 2) / 2) / (step * sqrt(2 * np.pi))
    return points_G, simpson_G * (density @ mass_G)
