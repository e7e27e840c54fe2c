"""Draw the figures of a study from curves.csv, one line per point: python -m results.tools.figures results/collapse."""

import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from results.tools.rows import read_csv
from simbal.report.page import figures, series
from simbal.report.page.series import Curve
from simbal.report.page.svg import svg

TOKENS, LOSS = "training tokens", "validation loss, nats per token"
AXES = {
    "loss": (TOKENS, LOSS), "loss-late": (TOKENS, LOSS), "sensitivity": ("value of the key", "perplexity"),
    "experts": (TOKENS, "experts in use"), "max-vio": (TOKENS, "MaxVio"), "pes": (TOKENS, "smallest PES of the layers"),
    "pes-rate": (TOKENS, "change of PES per million tokens"), "dropping": ("experts dropped", "perplexity"),
    "pruning": ("threshold of weight", "perplexity"),
}  # fmt: skip


def draw(folder: Path) -> None:
    """Write <figure>.svg for each figure in curves.csv."""
    for name, curves in read_curves(folder).items():
        figure = _figure(name, curves)
        figure.supxlabel(series.bands(curves), fontsize=7.5, color=figures.MUTED)
        figure.add_artist(Rectangle((0, 0), 1, 1, transform=figure.transFigure, color="white", zorder=-1))
        (folder / f"{name}.svg").write_text(svg(figure, f"{folder.name}-{name}"), encoding="utf-8")


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
        return figures.intervals(curves, "difference in validation loss, nats per token")
    if name.startswith("gap-"):
        labels = "tokens per expert parameter", f"nats above {name.removeprefix('gap-')}"
        return figures.curves(curves, *labels, log_x=True, zero=True)
    log, log_x = name in ("sensitivity", "dropping", "pruning"), name == "sensitivity"
    return figures.curves(curves, *AXES[name], log=log, log_x=log_x, zero=name == "pes-rate")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
