"""Compare hash routing with learned routers over training tokens: python -m results.tools.crossover results/crossover

lines.yaml lists the lines of the figure, each with its points:

    D=128, Python:
      - {study: bench_regime, sweep: short_4k, setting: eps=1e-08}
      - [{study: bench_regime, sweep: long_4k}, {study: crossover, sweep: four_25}]

A point compares the arms `hash` and `lbl` of a study whose names contain `sweep` and `setting`; a list of places joins
the seeds of several sweeps. The tool writes points.csv and crossover.svg, and prints for each line where the difference
changes its sign, and by how much it changes over the line.
"""

import csv
import sys
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import altair as alt
import numpy as np
import yaml
from scipy.stats import ttest_1samp

from results.tools.rows import StudyArm, read_csv, read_rows
from results.tools.verify import write_sums
from simbal.report.charts import DOCUMENT, STYLE_COLORS, STYLE_SHAPES, Columns, Figure, Medium, svg

HASH, LEARNED, LOSS = "hash", "lbl", "val/loss"
NOT_LEARNED = {HASH, "frozen", "uniform"}
FEWEST_SEEDS = 3  # for an interval
SHIFT = 1.025  # of each line in the figure


@dataclass(frozen=True)
class Point:
    """Loss of hash routing minus loss of learned routers, in nats, after `tokens` training tokens."""

    tokens: int
    differences: dict[int, float]  # hash minus lbl, by seed
    best: str  # learned router with the lowest mean loss
    best_difference: float  # mean loss of hash minus its mean loss

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return float(np.mean([*self.differences.values()]))


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
    pairs = {seed: hashed[seed] - learned[seed] for seed in hashed if seed in learned}
    # a name with a space has another treatment
    learned_arms = [key for key in losses if not NOT_LEARNED & {*key.split("_")} and " " not in key]
    means = {key: float(np.mean([*losses[key].values()])) for key in learned_arms}
    best = min(means, key=lambda key: means[key])
    return Point(tokens.pop(), pairs, best, float(np.mean([*hashed.values()])) - means[best])


def interval(point: Point, line: list[Point]) -> tuple[float, float] | tuple[None, None]:
    """Return the 95% interval of a point, simultaneous over its line (Bonferroni); None with too few seeds.

    The noise is that of the point's own seeds: it differs between lengths.
    """
    if len(point.differences) < FEWEST_SEEDS:
        return None, None
    count = sum(len(each.differences) >= FEWEST_SEEDS for each in line)
    found = ttest_1samp([*point.differences.values()], 0.0).confidence_interval(1 - 0.05 / count)
    return float(found.low), float(found.high)


@dataclass(frozen=True)
class Differences:
    """A figure: differences against training tokens, with intervals where there are enough seeds."""

    lines: dict[str, list[Point]]

    def rows(self) -> list[Columns]:
        """Return the points, one entry per line; lines are shifted a little, so that their intervals do not overlap."""
        return [
            {
                "line": line, "tokens": [point.tokens * SHIFT**place for point in points],
                "mean": [point.mean for point in points],
                "low": [interval(point, points)[0] for point in points],
                "high": [interval(point, points)[1] for point in points],
            }
            for place, (line, points) in enumerate(self.lines.items())
        ]  # fmt: skip

    def chart(self, medium: Medium) -> alt.LayerChart:
        """Return the chart, with a line at zero."""
        names = [*self.lines]

        def by_line(channel: Any, styles: list[str]) -> Any:
            legend = alt.Legend(orient="bottom", columns=2, labelLimit=0)
            return channel("line:N", title=None, legend=legend, scale=alt.Scale(domain=names, range=styles))

        lengths = sorted({point.tokens for points in self.lines.values() for point in points})
        axis, scale = alt.Axis(values=lengths, format=".3~s"), alt.Scale(type="log", nice=False, padding=12)
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


def change(line: list[Point]) -> tuple[Point, list[float]] | None:
    """Return the last point that shares enough seeds with the first, and each seed's change; None without it."""
    first = line[0]
    for last in reversed(line[1:]):
        shared = first.differences.keys() & last.differences.keys()
        if len(shared) >= FEWEST_SEEDS:
            return last, [last.differences[seed] - first.differences[seed] for seed in sorted(shared)]
    return None


def describe(points: list[Point], lines: int = 1) -> str:
    """Describe a line, sorted by tokens.

    Says where the mean changes its sign, which lengths have a resolved sign, and the change with its 95% interval,
    simultaneous over `lines` lines (Bonferroni).
    """
    changes = [
        f"changes sign between {_millions(before.tokens)} and {_millions(after.tokens)} tokens"
        for before, after in pairwise(points)
        if before.mean * after.mean < 0
    ]
    intervals = {_millions(point.tokens): interval(point, points) for point in points}
    hash_ahead = [tokens for tokens, (_, high) in intervals.items() if high is not None and high < 0]
    lbl_ahead = [tokens for tokens, (low, _) in intervals.items() if low is not None and low > 0]
    resolved = [f"{arm} is ahead at {', '.join(at)}" for arm, at in ((HASH, hash_ahead), (LEARNED, lbl_ahead)) if at]
    total: list[str] = []
    if found := change(points):
        last, by_seed = found
        low, high = ttest_1samp(by_seed, 0.0).confidence_interval(1 - 0.05 / lines)
        lengths = f"from {_millions(points[0].tokens)} to {_millions(last.tokens)} tokens"
        total = [f"{lengths} it changes by {np.mean(by_seed):+.3f} [{low:+.3f}, {high:+.3f}], {len(by_seed)} seeds"]
    return "; ".join([*(changes or ["does not change sign"]), *(resolved or ["not resolved at any length"]), *total])


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
    bars = "bars: 95% intervals for all points of a line at once, from three seeds or more"
    caption = f"Mean over paired seeds; {bars}; lines are shifted a little to the right."
    (folder / "crossover.svg").write_text(svg(cast("Figure", Differences(lines)), DOCUMENT, caption), encoding="utf-8")
    write_sums(folder.parent)
    tested = sum(change(points) is not None for points in lines.values())
    for line, points in lines.items():
        print(f"{line}: {describe(points, tested)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
