"""Distribution of the largest |t| of several comparisons, for simultaneous intervals.

References: C. W. Dunnett, JASA 50 (1955), for comparisons with one arm; J. W. Tukey (1953), for all pairs;
    Z. Sidak, JASA 62 (1967), for comparisons with noise of their own.
Shapes: Z and T nodes of integrals.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaincinv, gammaln, ndtr, stdtr

ALPHA = 0.05
NODES = 120  # of each integral; errors are below 1e-8

Array = NDArray[np.float64]


@dataclass(frozen=True)
class LargestT:
    """Distribution of the largest |t| of several comparisons.

    Kinds:
        baseline: equally correlated comparisons with a common noise (Dunnett). The correlation is 1/2 for one baseline
            on the same seeds; 0 is conservative for any comparisons.
        pairs: all pairs of `count` arms with a common noise (Tukey): the studentized range divided by sqrt(2).
        separate: each comparison has its own noise (Sidak).

    These may be a `share` of a table's comparisons, where the others have noise of their own.
    """

    count: int  # of comparisons; of arms for the kind `pairs`
    kind: Literal["baseline", "pairs", "separate"] = "baseline"
    correlation: float = 0.5
    share: float = 1.0

    def probability(self, bound: float, degrees: float) -> float:
        """Return the probability that no |t| exceeds `bound`, with this many degrees of freedom of the noise.

        For a share of a table it is raised to the power 1 / share, so the product over all shares is that of the table.
        """
        return float(self._probability(bound, degrees) ** (1 / self.share))

    def _probability(self, bound: float, degrees: float) -> float:
        if self.kind == "separate" or (self.kind == "baseline" and self.count == 1):
            return float(1 - 2 * stdtr(degrees, -bound)) ** self.count
        z_Z, weight_Z = _normal_nodes()
        noise_T, weight_T = noise_nodes(degrees)
        bound_TZ = bound * noise_T[:, None]
        if self.kind == "pairs":
            inside_TZ = self.count * (ndtr(z_Z) - ndtr(z_Z - sqrt(2) * bound_TZ)) ** (self.count - 1)
        else:
            common_Z, scale = sqrt(self.correlation) * z_Z, sqrt(1 - self.correlation)
            inside_TZ = (ndtr((bound_TZ - common_Z) / scale) - ndtr((-bound_TZ - common_Z) / scale)) ** self.count
        return float(weight_T @ inside_TZ @ weight_Z)

    def quantile(self, degrees: float, alpha: float = ALPHA) -> float:
        """Return the critical value, which some |t| exceeds with probability `alpha`."""
        return _quantile(self, degrees, alpha)


@cache
def _quantile(largest: LargestT, degrees: float, alpha: float) -> float:
    high = 2.0
    while largest.probability(high, degrees) < 1 - alpha:
        high *= 2
    return float(brentq(lambda bound: largest.probability(bound, degrees) - (1 - alpha), 0.0, high, xtol=1e-10))


@cache
def _normal_nodes() -> tuple[Array, Array]:
    """Return nodes and weights that integrate over a standard normal variable."""
    z_Z, weight_Z = np.polynomial.legendre.leggauss(NODES)
    z_Z, weight_Z = 8.5 * z_Z, 8.5 * weight_Z
    return z_Z, weight_Z * np.exp(-z_Z * z_Z / 2) / sqrt(2 * np.pi)


@cache
def noise_nodes(degrees: float) -> tuple[Array, Array]:
    """Return nodes and weights that integrate over the estimated noise divided by the true noise.

    Its square is chi-square distributed, divided by its degrees of freedom.
    """
    node_T, weight_T = np.polynomial.legendre.leggauss(NODES)
    low, high = np.sqrt(2 * gammaincinv(degrees / 2, [1e-13, 1 - 1e-13]) / degrees)
    noise_T = (high + low) / 2 + (high - low) / 2 * node_T
    log_density_T = (degrees - 1) * np.log(noise_T) - degrees * noise_T**2 / 2 + degrees / 2 * np.log(degrees / 2)
    return noise_T, (high - low) * weight_T * np.exp(log_density_T - gammaln(degrees / 2))
