"""The figures of a study, and the numbers that they are drawn from: curves.csv, one line per point."""

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.patches import Rectangle

from simbal.errors import UserError
from simbal.page import figures, series
from simbal.page.series import Curve, ShownArm
from simbal.page.svg import svg
from simbal.run_folder import write_text

TOKENS = "training tokens"
CURVES = "curves.csv"
HEADINGS = ["figure", "arm", "style", "x", "mean", "sd"]


def _over_tokens(key: str) -> Callable[[Sequence[ShownArm]], list[Curve]]:
    return lambda arms: series.over_tokens(arms, key)


FIGURES: dict[str, tuple[Callable[[Sequence[ShownArm]], list[Curve]], str, str]] = {
    "loss": (_over_tokens("val/loss"), TOKENS, "validation loss, nats per token"),
    "loss-late": (
        lambda arms: series.second_half(series.over_tokens(arms, "val/loss")),
        TOKENS,
        "validation loss, nats per token",
    ),
    "experts": (_over_tokens("load/unique_experts"), TOKENS, "experts in use"),
    "max-vio": (_over_tokens("load/max_vio"), TOKENS, "MaxVio"),
    "pes": (_over_tokens("pes/min"), TOKENS, "smallest PES of the layers"),
    "pes-rate": (lambda arms: series.rate(arms, "pes/min"), TOKENS, "change of PES per million tokens"),
    "dropping": (series.dropping, "experts dropped", "perplexity"),
    "pruning": (series.pruning, "threshold of weight", "perplexity"),
}
LOG = ("dropping", "pruning")
ZERO = ("pes-rate",)  # figures with a line at 0


def write_curves(arms: Sequence[ShownArm], folder: Path) -> None:
    """Means and standard deviations over seeds of every figure that there are data for."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(HEADINGS)
    for name, (points, _, _) in FIGURES.items():
        for curve in points(arms):
            sds: Sequence[float | str] = curve.sds or [""] * len(curve.xs)  # one seed has none
            lines.writerows(
                [name, curve.name, curve.style, *point] for point in zip(curve.xs, curve.means, sds, strict=True)
            )
    write_text(folder / CURVES, text.getvalue())


def draw(folder: Path) -> None:
    """<figure>.svg of every figure in curves.csv, on white.

    Raises:
        UserError: there is no curves.csv, or it is none.
    """
    for name, curves in _read(folder / CURVES).items():
        _, x_label, y_label = FIGURES[name]
        figure = figures.curves(curves, x_label, y_label, log=name in LOG, zero=name in ZERO)
        figure.add_artist(Rectangle((0, 0), 1, 1, transform=figure.transFigure, color="white", zorder=-1))
        write_text(folder / f"{name}.svg", svg(figure, f"{folder.name}-{name}"))


def _read(file: Path) -> dict[str, list[Curve]]:
    """The curves of each figure, in the order of the file."""
    found: dict[str, dict[str, Curve]] = {}
    try:
        with file.open(encoding="utf-8", newline="") as text:
            for row in csv.DictReader(text):
                curve = Curve(row["arm"], int(row["style"]), [], [], [] if row["sd"] else None)
                curve = found.setdefault(row["figure"], {}).setdefault(row["arm"], curve)
                curve.xs.append(float(row["x"]))
                curve.means.append(float(row["mean"]))
                if curve.sds is not None:
                    curve.sds.append(float(row["sd"]))
    except FileNotFoundError:
        raise UserError(f"there is no {file}: reproduce the study first") from None
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{file} does not hold the curves of a study") from None
    if unknown := found.keys() - FIGURES.keys():
        raise UserError(f"{file} has curves of a figure {min(unknown)!r}, which is not known")
    return {name: [*arms.values()] for name, arms in found.items()}
