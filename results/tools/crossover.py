"""Compare hash routing with learned routers over training tokens: python -m results.tools.crossover results/crossover

lines.yaml lists the lines of the figure, each with its points:

    D=128, Python:
      - {study: bench_regime, sweep: short_4k, setting: eps=1e-08}
      - [{study: bench_regime, sweep: long_4k}, {study: crossover, sweep: four_25}]

A point compares the arms `hash` and `lbl` of a study whose names contain `sweep` and `setting`; a list of places joins
the seeds of several sweeps. The tool writes
points.csv and crossover.svg, and prints for each line the tokens at which the difference would be zero. Intervals use
one standard deviation of paired differences per line, pooled over its points of at least 5M tokens.
"""

import csv
import math
import sys
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, cast

import altair as alt
import numpy as np
import yaml

from results.tools.rows import StudyArm, read_csv, read_rows
from results.tools.verify import write_sums
from simbal.report.charts import DOCUMENT, SHORT, STYLE_COLORS, STYLE_SHAPES, Columns, Figure, Medium, svg
from simbal.report.statistics import student_quantile

HASH, LEARNED, LOSS = "hash", "lbl", "val/loss"
NOT_LEARNED = {HASH, "frozen", "uniform"}
FARTHEST = 4  # report no crossing beyond this many times the longest run
FEWEST = 3  # points of a fit
SHORTEST = 5_000_000  # tokens; shorter runs vary more: drawn without interval, left out of noise and fit
FEWEST_DEGREES = 2  # of freedom, for an interval


@dataclass(frozen=True)
class Point:
    """Loss of hash routing minus loss of learned routers, in nats, after `tokens` training tokens."""

    tokens: int
    differences: tuple[float, ...]  # hash minus lbl, one per seed
    best: str  # learned router with the lowest mean loss
    best_difference: float  # mean loss of hash minus its mean loss

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return float(np.mean(self.differences))


@dataclass(frozen=True)
class Place:
    """Where a point's runs are."""

    study: str
    sweep: str = ""
    setting: str = ""

    def arms(self, results: Path) -> dict[str, StudyArm]:
        """Return the arms by balancing; `ValueError` unless there is exactly one of hash and one of lbl."""
        arms: dict[str, StudyArm] = {}
        for name, arm in read_rows(results / self.study).items():
            words = name.split()
            if (not self.sweep or f"sweep={self.sweep}" in words) and {*self.setting.split()} <= {*words}:
                if arm.balancing in arms:
                    raise ValueError(f"{self}: {name} and {arms[arm.balancing].name} match")
                arms[arm.balancing] = arm
        if not {HASH, LEARNED} <= arms.keys():
            raise ValueError(f"{self}: no arms {HASH} and {LEARNED}")
        return arms


def read_point(results: Path, *places: Place) -> Point:
    """Return a point from the runs at these places; `ValueError` if they differ in tokens or share a seed."""
    losses: dict[str, dict[int, float]] = {}
    tokens: set[int] = set()
    for place in places:
        arms = place.arms(results)
        for key, arm in arms.items():
            found = arm.values(LOSS)
            if found.keys() & losses.setdefault(key, {}).keys():
                raise ValueError(f"{place}: {key} has a seed that an earlier place has too")
            losses[key] |= found
        runs = {run.record for key in (HASH, LEARNED) for run in arms[key].runs}
        tokens |= {int(row["tokens"]) for row in read_csv(results / place.study / "partial.csv") if row["run"] in runs}
    if len(tokens) != 1:
        raise ValueError(f"{places}: the runs have {sorted(tokens)} tokens")
    hashed, learned = losses[HASH], losses[LEARNED]
    pairs = tuple(hashed[seed] - learned[seed] for seed in hashed if seed in learned)
    # a name with a space has another treatment
    learned_arms = [key for key in losses if not NOT_LEARNED & {*key.split("_")} and " " not in key]
    means = {key: float(np.mean([*losses[key].values()])) for key in learned_arms}
    best = min(means, key=lambda key: means[key])
    return Point(tokens.pop(), pairs, best, float(np.mean([*hashed.values()])) - means[best])


def without_short(points: list[Point]) -> list[Point]:
    """Return the points that count for noise, intervals and fit."""
    return [point for point in points if point.tokens >= SHORTEST]


def noise(points: list[Point]) -> tuple[float, int]:
    """Return the standard deviation of a difference around the mean of its point, and its degrees of freedom.

    Both are 0 if there are too few degrees of freedom.
    """
    degrees = sum(len(point.differences) - 1 for point in points)
    squares = sum((found - point.mean) ** 2 for point in points for found in point.differences)
    return (math.sqrt(squares / degrees), degrees) if degrees >= FEWEST_DEGREES else (0.0, 0)


def interval(point: Point, line: list[Point]) -> tuple[float, float] | tuple[None, None]:
    """Return a point's 95% interval, simultaneous over the line (Bonferroni); None for short runs or unknown noise."""
    counted = without_short(line)
    deviation, degrees = noise(counted)
    if not degrees or point not in counted:
        return None, None
    half = student_quantile(1 - 0.025 / len(counted), degrees) * deviation / math.sqrt(len(point.differences))
    return point.mean - half, point.mean + half


@dataclass(frozen=True)
class Fit:
    """A straight line, difference = start + slope ln(tokens), and the tokens at which it is zero."""

    start: float
    slope: float
    zero: float  # infinity if the slope is not positive
    low: float  # Fieller's 95% interval of `zero`: 0 to infinity if the slope may be zero or the noise is unknown
    high: float

    def at(self, tokens: float) -> float:
        """Return the difference that the line has after `tokens` training tokens."""
        return self.start + self.slope * math.log(tokens)


def fit(points: list[Point]) -> Fit:
    """Fit a line to all pairs of a line's points by least squares."""
    x = np.log([point.tokens for point in points for _ in point.differences])
    y = np.array([found for point in points for found in point.differences])
    center, level = float(x.mean()), float(y.mean())
    spread = float(((x - center) ** 2).sum())
    slope = float((x - center) @ y) / spread

    def tokens(log: float) -> float:
        return math.exp(log) if log < 100 else math.inf

    zero = tokens(center - level / slope) if slope > 0 else math.inf
    deviation, degrees = noise(points)
    error = (student_quantile(0.975, degrees) * deviation) ** 2 if degrees else math.inf
    square = slope**2 - error / spread
    low, high = 0.0, math.inf
    if slope > 0 and square > 0:
        # all u with (level + slope u)^2 <= error (1 / n + u^2 / spread), where u is ln(tokens) - center
        root = math.sqrt(max(0.0, (level * slope) ** 2 - square * (level**2 - error / len(y))))
        low, high = (tokens(center + (sign * root - level * slope) / square) for sign in (-1, 1))
    return Fit(level - slope * center, slope, zero, low, high)


@dataclass(frozen=True)
class Differences:
    """A figure: differences against training tokens, with intervals where the noise is known."""

    lines: dict[str, list[Point]]

    def rows(self) -> list[Columns]:
        """Return the points, one entry per line."""
        return [
            {
                "line": line, "tokens": [point.tokens for point in points], "mean": [point.mean for point in points],
                "low": [interval(point, points)[0] for point in points],
                "high": [interval(point, points)[1] for point in points],
            }
            for line, points in self.lines.items()
        ]  # fmt: skip

    def chart(self, medium: Medium) -> alt.LayerChart:
        """Return the chart, with a line at zero."""
        names = [*self.lines]

        def by_line(channel: Any, styles: list[str]) -> Any:
            legend = alt.Legend(orient="bottom", columns=2, labelLimit=0)
            return channel("line:N", title=None, legend=legend, scale=alt.Scale(domain=names, range=styles))

        axis, scale = alt.Axis(tickCount=4, labelExpr=SHORT), alt.Scale(type="log", nice=False, padding=12)
        x = alt.X("tokens:Q", title="training tokens", axis=axis, scale=scale)
        base = alt.Chart(alt.NamedData("rows")).encode(x=x, color=by_line(alt.Color, STYLE_COLORS[: len(names)]))
        y = alt.Y("mean:Q", title="loss of hash minus loss of lbl, nats per token")
        bars = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=1.5)
        points = base.mark_point(filled=True, size=3 * medium.letters, opacity=1)
        zero = alt.Chart(alt.Data(values=[{}])).mark_rule().encode(y=alt.YDatum(0))
        return alt.layer(
            zero,
            base.mark_line(opacity=0.6).encode(y=y),
            bars.encode(y=alt.Y("low:Q"), y2=alt.Y2("high")),
            points.encode(y=y, shape=by_line(alt.Shape, STYLE_SHAPES[: len(names)])),
        )


def describe(points: list[Point]) -> str:
    """Return where the differences of a line, sorted by tokens, are zero: from neighboring means and from a fit."""
    changes = [
        f"changes sign between {_millions(before.tokens)} and {_millions(after.tokens)} tokens"
        for before, after in pairwise(points)
        if before.mean * after.mean < 0
    ]
    return "; ".join([*(changes or ["does not change sign"]), _describe_fit(points)])


def _describe_fit(points: list[Point]) -> str:
    counted = without_short(points)
    if len(counted) < FEWEST:
        return f"no fit with fewer than {FEWEST} lengths"
    line, (_, degrees) = fit(counted), noise(counted)
    misses = {point.tokens: abs(point.mean - line.at(point.tokens)) for point in counted}
    for point in counted:
        low, high = interval(point, points)
        if low is not None and high is not None and misses[point.tokens] > (high - low) / 2:
            tokens, miss = max(misses.items(), key=itemgetter(1))
            return f"not a straight line: the fit is up to {miss:.3f} nats off, at {_millions(tokens)} tokens"
    if not line.zero <= FARTHEST * max(misses):
        return f"the fit is not zero within {FARTHEST} times the longest run"
    reach = f"{_millions(line.low)} to {_millions(line.high)}"
    if line.high == math.inf:
        reach = "no interval: the slope may be zero" if degrees else "no interval: too few seeds"
    return f"the fit is zero at {_millions(line.zero)} tokens ({reach})"


def _millions(tokens: float) -> str:
    return f"{tokens / 1e6:.1f}M"


def places_of(point: dict[str, str] | list[dict[str, str]]) -> list[Place]:
    """Return the places of a point in lines.yaml."""
    return [Place(**place) for place in ([point] if isinstance(point, dict) else point)]


def main(folder: Path) -> None:
    """Write points.csv and the figure, and print the crossing of each line."""
    sources = yaml.safe_load((folder / "lines.yaml").read_text(encoding="utf-8"))
    lines = {
        line: sorted((read_point(folder.parent, *places_of(point)) for point in points), key=attrgetter("tokens"))
        for line, points in sources.items()
    }
    with (folder / "points.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["line", "tokens", "seeds", "mean", "low", "high", "best_learned", "hash_minus_best_learned"])
        for line, points in lines.items():
            for at in points:
                numbers = [at.mean, *interval(at, points)]
                table.writerow([line, at.tokens, len(at.differences), *numbers, at.best, at.best_difference])
    caption = "Mean over paired seeds; bars: 95% intervals for all points of a line, with the line's pooled noise."
    (folder / "crossover.svg").write_text(svg(cast("Figure", Differences(lines)), DOCUMENT, caption), encoding="utf-8")
    write_sums(folder.parent)
    for line, points in lines.items():
        print(f"{line}: {describe(points)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
