"""Draw the figures of a study from its curves.csv: python -m results.tools.figures results/collapse."""

import csv
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from results.tools.rows import read_csv
from simbal.report.charts import DOCUMENT, Figure, Forest, Interval, Lines, svg
from simbal.report.curves import Curve, describe_bands

COLUMNS = ["figure", "arm", "style", "x", "mean", "band", "rival"]  # of curves.csv
TOKENS, LOSS = "training tokens", "validation loss, nats per token"
AXES = {
    "loss": (TOKENS, LOSS), "loss-late": (TOKENS, LOSS), "sensitivity": ("value of the key", "perplexity"),
    "experts": (TOKENS, "experts in use"), "max-vio": (TOKENS, "MaxVio"), "pes": (TOKENS, "smallest PES of the layers"),
    "pes-rate": (TOKENS, "change of PES per million tokens"), "dropping": ("experts dropped", "perplexity"),
    "pruning": ("threshold of weight", "perplexity"), "budget": ("points tried", "expected lowest loss, nats"),
    "ladder": ("training compute, FLOPs", LOSS),
}  # fmt: skip
NOTES = {"ladder": "Means over seeds. The last point of a fit is its prediction."}


def draw(folder: Path) -> None:
    """Write <figure>.svg for each figure in curves.csv."""
    for name, curves in read_curves(folder).items():
        image = svg(_figure(name, curves), DOCUMENT, NOTES.get(name) or describe_bands(curves))
        (folder / f"{name}.svg").write_text(image, encoding="utf-8")


def redraw(folder: Path, figure: str, points: Iterable[list[Any]]) -> None:
    """Replace the points of one figure in curves.csv, and draw all figures. A point has the other `COLUMNS`."""
    kept = [[*row.values()] for row in read_csv(folder / "curves.csv") if row["figure"] != figure]
    with (folder / "curves.csv").open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerows([COLUMNS, *kept, *([figure, *point] for point in points)])
    draw(folder)


def read_curves(folder: Path) -> dict[str, list[Curve]]:
    """Return the curves of each figure."""
    found: dict[str, dict[str, Curve]] = {}
    for row in read_csv(folder / "curves.csv"):
        bands: list[float] | None = [] if row["band"] else None
        curve = Curve(row["arm"], int(row["style"]), [], [], bands, row["rival"] or None)
        curve = found.setdefault(row["figure"], {}).setdefault(row["arm"], curve)
        curve.xs.append(float(row["x"]))
        curve.means.append(float(row["mean"]))
        if curve.bands is not None:
            curve.bands.append(float(row["band"]))
    return {name: [*curves.values()] for name, curves in found.items()}


def _figure(name: str, curves: list[Curve]) -> Figure:
    if name == "differences":
        return Forest([*map(_interval, curves)], "difference in validation loss, nats per token")
    log, log_x = name in ("sensitivity", "dropping", "pruning"), name in ("sensitivity", "ladder")
    return Lines([("", curves)], *AXES[name], log, log_x, zero=name == "pes-rate")


def _interval(point: Curve) -> Interval:
    """Return a curve of one point as a difference, with the conclusion that its interval implies."""
    (mean,), ((low, high),) = point.means, point.band_ends
    word = "higher" if low > 0 else "lower" if high < 0 else "not resolved"
    text = f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
    return Interval(point.arm, mean, low, high, word, text, text)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
