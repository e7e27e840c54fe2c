"""The schedule of a strategy's coefficient. It imports no torch, because a sweep checks it before the first job."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from simbal.config.values import check_nonnegative
from simbal.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """The factor of a coefficient at each optimizer step: linear between `points`, constant before and after them."""

    points: tuple[tuple[int, float], ...] = ((0, 1.0),)

    @classmethod
    def parse(cls, key: str, value: Any, max_steps: int) -> "Schedule":
        """Build a schedule from a config value: null (the factor is always 1) or [[step, factor], ...].

        Raises:
            UserError: the value is not such a list, the steps do not increase, or the last step is after `max_steps`.
        """
        if value is None:
            return cls()
        is_list = isinstance(value, list) and all(isinstance(point, list) and len(point) == 2 for point in value)
        if not is_list or not value or not all(type(step) is int and step >= 0 for step, _ in value):
            raise UserError(f"{key}={value} must be null or a list of points [step, factor], such as [[0,1],[100,0]]")
        points = tuple((step, check_nonnegative(f"{key}: factor", factor)) for step, factor in value)
        if any(first >= second for (first, _), (second, _) in pairwise(points)):
            raise UserError(f"{key}={value}: each point's step must be larger than the one before")
        last = points[-1][0]
        if last > max_steps:
            raise UserError(f"{key}={value} ends at step {last}, after the run (trainer.max_steps={max_steps})")
        return cls(points)

    def factor(self, step: int) -> float:
        """Return the factor at optimizer step `step`, counted from 0."""
        for (s0, f0), (s1, f1) in pairwise(self.points):
            if s0 <= step < s1:
                return f0 + (f1 - f0) * (step - s0) / (s1 - s0)
        return self.points[0][1] if step < self.points[0][0] else self.points[-1][1]
