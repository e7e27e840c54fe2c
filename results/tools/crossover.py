"""Compare hash routing with learned routers over training tokens: python -m results.tools.crossover results/crossover

lines.yaml lists the lines of the figure, each with its points:

    D=128, Python:
      - {study: bench_regime, sweep: short_4k, setting: eps=1e-08}

A point compares the arms `hash` and `lbl` of a study whose names contain `sweep` and `setting`. The tool writes
points.csv and crossover.svg, and prints for each line the tokens at which the difference would be zero.
"""

import csv
import math
import sys
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import altair as alt
import numpy as np
import yaml

from results.tools.pages import Study
from results.tools.rows import StudyArm, read_csv
from results.tools.verify import write_sums
from simbal.report.charts import DOCUMENT, SHORT, STYLE_COLORS, STYLE_SHAPES, Columns, Figure, Medium, svg

HASH, LEARNED, LOSS = "hash", "lbl", "val/loss"
NOT_LEARNED = {HASH, "frozen", "uniform"}
RESAMPLES, SEED = 2000, 0
FARTHEST = 4  # report no crossing beyond this many times the longest run
FEWEST = 3  # points of a fit


@dataclass(frozen=True)
class Point:
    """Loss of hash routing minus loss of learned routers, in nats, after `tokens` training tokens."""

    tokens: int
    differences: tuple[float, ...]  # hash minus lbl, one per seed
    low: float | None  # simultaneous 95% interval over the arms of the study; None with one seed
    high: float | None
    best: str  # learned router with the lowest mean loss
    best_difference: float  # mean loss of hash minus its mean loss

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return float(np.mean(self.differences))


def read_point(results: Path, study: str, sweep: str = "", setting: str = "") -> Point:
    """Return a point from the runs of a study; `ValueError` unless it has exactly one arm of hash and one of lbl."""
    found = Study(results / study)
    arms: dict[str, StudyArm] = {}
    for name, arm in found.arms.items():
        words = name.split()
        if (not sweep or f"sweep={sweep}" in words) and {*setting.split()} <= {*words}:
            if arm.balancing in arms:
                raise ValueError(f"{study}: {name} and {arms[arm.balancing].name} match sweep and setting")
            arms[arm.balancing] = arm
    if not {HASH, LEARNED} <= arms.keys():
        raise ValueError(f"{study}: no arms {HASH} and {LEARNED} with sweep={sweep} setting={setting}")
    hashed, learned = arms[HASH].values(LOSS), arms[LEARNED].values(LOSS)
    pairs = tuple(hashed[seed] - learned[seed] for seed in hashed if seed in learned)
    interval = found.statistics(LOSS, arms[HASH].name, arms[LEARNED].name)
    # a name with a space has another treatment
    learned_arms = [key for key in arms if not NOT_LEARNED & {*key.split("_")} and " " not in key]
    means = {key: float(np.mean([*arms[key].values(LOSS).values()])) for key in learned_arms}
    best = min(means, key=lambda key: means[key])
    runs = {run.record for arm in (arms[HASH], arms[LEARNED]) for run in arm.runs}
    (tokens,) = {int(row["tokens"]) for row in read_csv(results / study / "partial.csv") if row["run"] in runs}
    best_difference = float(np.mean([*hashed.values()])) - means[best]
    return Point(tokens, pairs, interval.get("low"), interval.get("high"), best, best_difference)


def crossing(points: list[Point]) -> dict[str, Any]:
    """Fit difference = b + s ln(tokens) to the means, and return s and the tokens at which it is zero.

    `low` and `high` are the 2.5 and 97.5% quantiles over resamples of seeds; infinity if the difference does not grow.
    """
    logs = np.log([point.tokens for point in points])

    def zero(means: list[float]) -> tuple[float, float]:
        slope, start = np.polyfit(logs, means, 1)
        return float(slope), math.exp(-start / slope) if slope > 0 and -start / slope < 100 else math.inf

    slope, tokens = zero([point.mean for point in points])
    draws = np.random.default_rng(SEED)
    resampled = [
        zero([float(draws.choice(point.differences, len(point.differences)).mean()) for point in points])[1]
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(resampled, [0.025, 0.975], method="inverted_cdf")
    return {"slope": slope, "tokens": tokens, "low": float(low), "high": float(high)}


@dataclass(frozen=True)
class Differences:
    """A figure: differences against training tokens, with intervals where a study has them."""

    lines: dict[str, list[Point]]

    def rows(self) -> list[Columns]:
        """Return the points, one entry per line."""
        return [
            {
                "line": line, "tokens": [point.tokens for point in points], "mean": [point.mean for point in points],
                "low": [point.low for point in points], "high": [point.high for point in points],
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
    """Return one sentence about the crossing of a line."""
    if len(points) < FEWEST:
        return f"fewer than {FEWEST} lengths"
    found, longest = crossing(points), max(point.tokens for point in points)
    if not found["tokens"] <= FARTHEST * longest:
        return f"no crossing within {FARTHEST} times the longest run ({longest / 1e6:.1f}M tokens)"
    ends = [f"{end / 1e6:.1f}M" if math.isfinite(end) else "none" for end in (found["low"], found["high"])]
    return f"crosses zero at {found['tokens'] / 1e6:.1f}M tokens [{', '.join(ends)}]"


def main(folder: Path) -> None:
    """Write points.csv and the figure, and print the crossing of each line."""
    sources = yaml.safe_load((folder / "lines.yaml").read_text(encoding="utf-8"))
    lines = {
        line: sorted((read_point(folder.parent, **place) for place in places), key=attrgetter("tokens"))
        for line, places in sources.items()
    }
    with (folder / "points.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["line", "tokens", "seeds", "mean", "low", "high", "best_learned", "hash_minus_best_learned"])
        for line, points in lines.items():
            for at in points:
                ends = [at.low, at.high, at.best, at.best_difference]
                table.writerow([line, at.tokens, len(at.differences), at.mean, *ends])
    caption = "Mean over paired seeds; bars: simultaneous 95% intervals (none with one seed)."
    (folder / "crossover.svg").write_text(svg(cast("Figure", Differences(lines)), DOCUMENT, caption), encoding="utf-8")
    write_sums(folder.parent)
    for line, points in lines.items():
        print(f"{line}: {describe(points)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
