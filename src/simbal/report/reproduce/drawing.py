"""The figures of a study, and the numbers that they are drawn from: curves.csv, one line per point."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from simbal.errors import UserError
from simbal.files.disk import write_text
from simbal.report.page import figures, series
from simbal.report.page.page import figure_arms
from simbal.report.page.series import Curve
from simbal.report.page.styles import MOST_ARMS
from simbal.report.page.svg import svg
from simbal.report.table import Table

CURVES = "curves.csv"
HEADINGS = ["figure", "arm", "style", "x", "mean", "band", "rival"]
TOKENS, LOSS = "training tokens", "validation loss, nats per token"
DIFFERENCES = "differences"  # of every arm, in the loss, where there are more arms than the other figures show
GAP = "gap-"  # and the name of a rival: how far the loss of an arm lies above its
AXES = {
    "loss": (TOKENS, LOSS),
    "loss-late": (TOKENS, LOSS),
    "sensitivity": ("value of the key", "perplexity"),
    "experts": (TOKENS, "experts in use"),
    "max-vio": (TOKENS, "MaxVio"),
    "pes": (TOKENS, "smallest PES of the layers"),
    "pes-rate": (TOKENS, "change of PES per million tokens"),
    "dropping": ("experts dropped", "perplexity"),
    "pruning": ("threshold of weight", "perplexity"),
}
LOG = ("sensitivity", "dropping", "pruning")


def write_curves(shown: Mapping[str, Sequence[Curve]], folder: Path) -> None:
    """Write the means over seeds, and their bands, of every figure."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(HEADINGS)
    for name, curves in shown.items():
        for curve in curves:
            bands: Sequence[float | str] = curve.bands or [""] * len(curve.xs)  # one seed has none
            lines.writerows(
                [name, curve.name, curve.style, *point, curve.rival]
                for point in zip(curve.xs, curve.means, bands, strict=True)
            )
    write_text(folder / CURVES, text.getvalue())


def curves_of(table: Table) -> dict[str, list[Curve]]:
    """Return the curves of a table, by figure, of which those without data have none.

    Raises:
        UserError: the file of a run's curve is broken.
    """
    arms = series.read(figure_arms(table), table.baseline)
    return {
        "loss": series.over_tokens(arms, "val/loss"),
        "experts": series.over_tokens(arms, "val/unique_experts"),
        "max-vio": series.over_tokens(arms, "val/max_vio"),
        "pes": series.over_tokens(arms, "val/min_pes"),
        "pes-rate": series.rate(arms, "val/min_pes"),
        "dropping": series.dropping(arms),
        "pruning": series.pruning(arms),
        DIFFERENCES: _differences(table),
    }


def draw(folder: Path) -> None:
    """Draw every figure in curves.csv as <figure>.svg, on white.

    Raises:
        UserError: there is no curves.csv, or it is none.
    """
    for name, curves in _read(folder / CURVES).items():
        figure = _figure(name, curves)
        figure.supxlabel(series.bands(curves), fontsize=7.5, color=figures.MUTED)
        figure.add_artist(Rectangle((0, 0), 1, 1, transform=figure.transFigure, color="white", zorder=-1))
        write_text(folder / f"{name}.svg", svg(figure, f"{folder.name}-{name}"))


def _differences(table: Table) -> list[Curve]:
    """Return a point for each arm: its mean loss, and the paired difference to that of its rival; the lowest first."""
    if len(table.rows) <= MOST_ARMS:
        return []
    points = []
    for row in table.compared:
        if row.other and (found := row.differences.get("val/loss")):
            loss = fmean(row.arm.values("val/loss").values())
            bands = None if found.low is None or found.high is None else [(found.high - found.low) / 2]
            points.append(Curve(row.arm.name, 0, [loss], [found.mean], bands, row.other.name))
    return sorted(points, key=lambda point: point.means)


def _figure(name: str, curves: Sequence[Curve]) -> Figure:
    if name == DIFFERENCES:
        return figures.intervals(curves, "difference in validation loss, nats per token")
    gap = name.startswith(GAP)
    labels = ("tokens per expert parameter", f"nats above {name.removeprefix(GAP)}") if gap else AXES[name]
    log_x, zero = gap or name == "sensitivity", gap or name == "pes-rate"
    return figures.curves(curves, *labels, log=name in LOG, log_x=log_x, zero=zero)


def _read(file: Path) -> dict[str, list[Curve]]:
    """Return the curves of each figure, in the order of the file."""
    found: dict[str, dict[str, Curve]] = {}
    try:
        with file.open(encoding="utf-8", newline="") as text:
            for row in csv.DictReader(text):
                bands: list[float] | None = [] if row["band"] else None
                curve = Curve(row["arm"], int(row["style"]), [], [], bands, row["rival"] or None)
                curve = found.setdefault(row["figure"], {}).setdefault(row["arm"], curve)
                curve.xs.append(float(row["x"]))
                curve.means.append(float(row["mean"]))
                if curve.bands is not None:
                    curve.bands.append(float(row["band"]))
    except FileNotFoundError:
        raise UserError(f"there is no {file}: reproduce the study first") from None
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{file} does not hold the curves of a study") from None
    if unknown := {name for name in found if name not in (*AXES, DIFFERENCES) and not name.startswith(GAP)}:
        raise UserError(f"{file} has curves of a figure {min(unknown)!r}, which is not known")
    return {name: [*arms.values()] for name, arms in found.items()}
