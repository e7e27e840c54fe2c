"""How the experts' load settles in a run: numbers of its curve of MaxVio, (step, value) of each logged step."""

from collections.abc import Sequence
from statistics import median, quantiles

Curve = Sequence[tuple[int, float]]
FEWEST = 10  # points of a curve: half of them have a percentile
WINDOW = 5  # points of a median, in which a single uneven batch does not count
NEAR = 1.25  # of the settled value


def tail(curve: Curve) -> float | None:
    """Return the 95th percentile of the second half of the curve, by linear interpolation; None for a short one."""
    return quantiles(_second_half(curve), n=20, method="inclusive")[-1] if len(curve) >= FEWEST else None


def steps_to_settle(curve: Curve) -> int | None:
    """Return the first step from which on the load is about as even as it gets, or None for a short curve.

    At that step, and at every later one, the median of five points that begins there is at most 1.25 times the median
    of the second half. None also for a curve that rises steeply to its end.
    """
    if len(curve) < FEWEST:
        return None
    bound = NEAR * median(_second_half(curve))
    values = [value for _, value in curve]
    medians = [median(values[first : first + WINDOW]) for first in range(len(values) - WINDOW + 1)]
    uneven = [place for place, value in enumerate(medians) if value > bound]
    settled = uneven[-1] + 1 if uneven else 0
    return curve[settled][0] if settled < len(medians) else None


def _second_half(curve: Curve) -> list[float]:
    return [value for _, value in curve[len(curve) // 2 :]]
