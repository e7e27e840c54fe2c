"""A group-sequential plan for paired seeds: looks at the differences that may stop a study early at an error of 5%.

Whoever tests after each few seeds and stops at the first p below 0.05 finds a difference between equal arms in far more
than 5% of studies. The plan spends the error bit by bit instead: the boundary of each look is a nominal p, strict at
first and nearly alpha at the end.

The boundaries are those of normal statistics, and the p of a t test is held against them (the significance-level
approach). That is an approximation for so few pairs: of 400,000 simulated studies of equal arms with looks after every
5 of 40 pairs, 5.19% found a difference.

Reference: K. K. G. Lan and D. L. DeMets, Biometrika 70 (1983), for the spending; P. Armitage, C. K. McPherson and
    B. C. Rowe, Journal of the Royal Statistical Society A 132 (1969), for the recursion; C. Jennison and
    B. W. Turnbull, Group Sequential Methods (2000), sections 3.3, 7.2 and 11, for t statistics.
Shapes: G points of a grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from math import sqrt
from typing import TYPE_CHECKING, Literal

from simbal.report.conclusion import ALPHA, equivalence_p
from simbal.report.statistics import paired_difference

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Decision = Literal["lower", "higher", "equivalent", "not resolved"]
POINTS = 501  # of a grid: odd, for Simpson's rule
FARTHEST = 9.0  # standard deviations: beyond it lies less than 1e-18
STEPS = 60  # of a bisection


def boundaries(looks: Sequence[int], most: int, alpha: float = ALPHA) -> list[float]:
    """Return the nominal two-sided p at or below which each look stops, with O'Brien-Fleming-type spending.

    Args:
        looks: how many pairs there are at each look, increasing.
        most: the pairs of the whole plan; the last look has as many or fewer.
        alpha: two-sided error of the whole plan; for one-sided tests give twice theirs and take half of each p.

    Raises:
        ValueError: the looks do not increase from 2 to `most`, or alpha is not between 0 and 1.
    """
    if not looks or looks[0] < 2 or looks[-1] > most or any(a >= b for a, b in pairwise(looks)):
        raise ValueError(f"looks {list(looks)} must increase from 2 or more to {most} or less")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha {alpha} must lie between 0 and 1")
    return [*_boundaries(tuple(look / most for look in looks), alpha)]


def spent(share: float, alpha: float) -> float:
    """Return the two-sided error that may be spent up to a share of the plan's pairs: nearly none early on.

    It is the O'Brien-Fleming-type function of Lan and DeMets for each side: 2 - 2 Phi(z / sqrt(share)), with z the
    upper quantile of alpha / 4.
    """
    from scipy.special import ndtr, ndtri

    return float(4 * ndtr(ndtri(alpha / 4) / sqrt(share)))


def decided(
    differences: Sequence[float], looks: Sequence[int], most: int, margin: float | None = None, alpha: float = ALPHA
) -> Decision | None:
    """Return what a look decides; None: go on to the next.

    Args:
        differences: treatment minus baseline of each pair, as many as one of the looks.
        looks: as `boundaries` takes them.
        most: the pairs of the whole plan.
        margin: of equivalence, in the unit of the differences; None: equivalence is not asked for.
        alpha: two-sided error of the test of a difference, one-sided error of each test of TOST.

    Raises:
        ValueError: there is no look at so many differences, or as `boundaries` does.
    """
    if len(differences) not in looks:
        raise ValueError(f"there is no look at {len(differences)} pairs: looks are at {', '.join(map(str, looks))}")
    look = [*looks].index(len(differences))
    found = paired_difference(dict(enumerate(differences)), dict.fromkeys(range(len(differences)), 0.0))
    assert found
    if found.p is not None and found.p <= boundaries(looks, most, alpha)[look]:
        return "lower" if found.mean < 0 else "higher"
    if margin is not None and found.sd is not None:
        p = equivalence_p(found.mean, found.sd / sqrt(found.pairs), found.pairs - 1, margin)
        if p <= boundaries(looks, most, 2 * alpha)[look] / 2:
            return "equivalent"
    return "not resolved" if look == len(looks) - 1 else None


@cache
def _boundaries(shares: tuple[float, ...], alpha: float) -> tuple[float, ...]:
    """Return the nominal p of each look from the distribution of a Brownian motion that no earlier look has stopped."""
    import numpy as np
    from scipy.special import ndtr

    nominal: list[float] = []
    before = 0.0
    grid_G, mass_G = np.zeros(1), np.ones(1)  # at the start it is 0 for certain
    for share in shares:
        step = sqrt(share - before)
        error = spent(share, alpha) - (spent(before, alpha) if before else 0.0)
        z = _boundary(grid_G, mass_G, step, sqrt(share), error)
        nominal.append(float(2 * ndtr(-z)))
        edge = min(z, FARTHEST) * sqrt(share)
        grid_G, mass_G = _continued(grid_G, mass_G, step, edge)
        before = share
    return tuple(nominal)


def _boundary(
    grid_G: NDArray[np.float64], mass_G: NDArray[np.float64], step: float, scale: float, error: float
) -> float:
    """Return the z that a motion from the grid, `step` later, lies beyond on either side with the chance `error`."""
    from scipy.special import ndtr

    low, high = 0.0, 40.0  # the normal tail beyond 38 is 0 in floats
    for _ in range(STEPS):
        middle = (low + high) / 2
        beyond = ndtr((grid_G - middle * scale) / step) + ndtr((-grid_G - middle * scale) / step)
        low, high = (middle, high) if float(beyond @ mass_G) > error else (low, middle)
    return high


def _continued(
    grid_G: NDArray[np.float64], mass_G: NDArray[np.float64], step: float, edge: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a new grid between the boundaries, and the chance near each point that the motion is there, unstopped."""
    import numpy as np

    points_G = np.linspace(-edge, edge, POINTS)
    simpson_G = np.where(np.arange(POINTS) % 2, 4.0, 2.0) * (2 * edge / (POINTS - 1) / 3)
    simpson_G[[0, -1]] /= 2
    density = np.exp(-(((points_G[:, None] - grid_G) / step) ** 2) / 2) / (step * sqrt(2 * np.pi))
    return points_G, simpson_G * (density @ mass_G)
