"""Draws curves and loads as matplotlib Figures, without pyplot and its global state.

Shapes: L MoE layers, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from simbal.report.collect import Run
from simbal.report.page.chart import spans
from simbal.report.page.series import Curve, ShownArm, broken, number
from simbal.report.page.styles import color, look

INK, MUTED, LINE = "#1f2328", "#656d76", "#d0d7de"
RC: dict[Any, Any] = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9,
    "axes.titlesize": 9, "axes.labelsize": 9,
    "text.color": INK, "axes.titlecolor": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED,
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.7,
    "axes.grid": True, "grid.color": LINE, "grid.linewidth": 0.5, "axes.axisbelow": True,
    "lines.linewidth": 1.5, "lines.markersize": 3.5, "legend.fontsize": 8.5,
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "text.parse_math": False,  # a name with dollar signs is a name
    "svg.fonttype": "none",  # text stays text: small, crisp, and found by a search in the page
}  # fmt: skip
WIDTH, HEIGHT, PANEL_HEIGHT, ROW_HEIGHT = 5.0, 3.0, 1.45, 0.19  # inches
LOAD_MAP = "PuOr_r"
LONGEST = 34  # letters of a name in a legend; the table has all of it


@dataclass(frozen=True)
class LoadMap:
    """The load of each expert of each layer of a run, by the expert's index, where 1 is the even load."""

    name: str
    loads_LE: list[list[float]]


def loads(arms: Sequence[ShownArm]) -> list[LoadMap]:
    """Return the load map of each arm's first run that has recorded the load."""
    maps = []
    for arm in arms:
        found = ((history.run, counts) for history in arm.histories if (counts := _counts(history.run)))
        for run, counts_LE in islice(found, 1):
            maps.append(LoadMap(f"{arm.name} seed={run.seed}", [_relative(counts_E) for counts_E in counts_LE]))
    return maps


def curves(
    lines: Sequence[Curve], x_label: str, y_label: str, log: bool = False, log_x: bool = False, zero: bool = False
) -> Figure:
    """Draw means with their bands.

    Args:
        lines: the arms.
        x_label: with its unit; a label that ends in `tokens` gets marks such as 20k and 1.5M.
        y_label: with its unit.
        log: a logarithmic scale for y where values differ by more than a factor of 4.
        log_x: the same for x.
        zero: mark y = 0.
    """
    with rc_context(RC):
        figure = Figure((WIDTH, HEIGHT + _legend_height(lines)), layout="constrained")
        axes = figure.add_subplot()
        if zero:
            axes.axhline(0, color=MUTED, linewidth=0.8)
        _draw(axes, lines)
        if log and spans([mean for line in lines for mean in line.means]):
            axes.set_yscale("log", nonpositive="clip")
            _mark(axes.yaxis, subs=(1, 1.5, 2, 3, 5, 7))
            y_label = f"{y_label} (log scale)"
        if log_x and spans([x for line in lines for x in line.xs]):
            axes.set_xscale("log")
            _mark(axes.xaxis, subs=(1, 3))
            x_label = f"{x_label} (log scale)"
        _label(axes, x_label, y_label)
        _legend(figure, lines)
    return figure


def panels(panels: Sequence[tuple[str, Sequence[Curve]]], x_label: str, y_label: str) -> Figure:
    """Draw one panel of curves below the other, two in a row, on the same scales."""
    with rc_context(RC):
        arms = {line.name: line for _, lines in panels for line in lines}.values()
        rows, columns = _grid(len(panels))
        height = PANEL_HEIGHT * rows + 0.35 + _legend_height([*arms])
        figure = Figure((WIDTH, height), layout="constrained")
        first = None
        for place, (title, lines) in enumerate(panels):
            left, bottom = place % columns == 0, place >= len(panels) - columns
            axes = figure.add_subplot(rows, columns, place + 1, sharex=first, sharey=first)
            first = first or axes
            _draw(axes, lines)
            axes.set_title(title, loc="left")
            _label(axes, x_label if bottom else "", y_label if left else "")
            axes.tick_params(labelbottom=bottom, labelleft=left)
        _legend(figure, [*arms])
    return figure


def intervals(points: Sequence[Curve], x_label: str) -> Figure:
    """Draw the mean and the band of each arm's one point as a line of its own, the first at the top, beside 0."""
    with rc_context(RC):
        figure = Figure((WIDTH, 0.7 + ROW_HEIGHT * len(points)), layout="constrained")
        axes = figure.add_subplot()
        axes.axvline(0, color=MUTED, linewidth=0.8)
        for place, point in enumerate(points):
            axes.errorbar(point.means, [place], xerr=point.bands, fmt="o", color=color(0), capsize=0)
        axes.set_yticks(range(len(points)), [_short(point.name) for point in points])
        axes.set_ylim(len(points) - 0.4, -0.6)
        _label(axes, x_label, "")
    return figure


def load_maps(maps: Sequence[LoadMap]) -> Figure:
    """Draw layers by experts, coloured by load: white is the even load, and all maps share the scale below them."""
    with rc_context(RC | {"axes.grid": False}):
        rows, columns = _grid(len(maps))
        figure = Figure((WIDTH, PANEL_HEIGHT * rows + 0.7), layout="constrained")
        grid = figure.add_gridspec(rows + 1, columns, height_ratios=[*[1.0] * rows, 0.1])
        largest = max(2.0, *(max(loads_E) for each in maps for loads_E in each.loads_LE))
        shades: dict[str, Any] = {
            "cmap": LOAD_MAP, "norm": TwoSlopeNorm(1, 0, largest), "interpolation": "none", "aspect": "auto"
        }  # fmt: skip
        for place, each in enumerate(maps):
            left, bottom = place % columns == 0, place >= len(maps) - columns
            axes = figure.add_subplot(grid[place // columns, place % columns])
            num_layers, num_experts = len(each.loads_LE), len(each.loads_LE[0])
            axes.imshow(each.loads_LE, extent=(-0.5, num_experts - 0.5, num_layers - 0.5, -0.5), **shades)
            axes.set_title(_short(each.name), loc="left")
            _label(axes, "expert" if bottom else "", "layer" if left else "")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(MaxNLocator(5, integer=True))
        scale = figure.add_subplot(grid[rows, :])
        scale.imshow([[largest * (i + 0.5) / 128 for i in range(128)]], extent=(0, largest, 0, 1), **shades)
        scale.set_yticks([])
        scale.set_xticks([0, 1, largest], ["0: never", "1: even load", f"{largest:.2g} times it"])
        first, _, last = scale.get_xticklabels()
        first.set_horizontalalignment("left")
        last.set_horizontalalignment("right")
    return figure


def count(value: float) -> str:
    """Return a number in short: `20k`, `1.5M`, `2B`."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def _relative(counts_E: Sequence[float]) -> list[float]:
    """Return counts by their mean."""
    even = sum(counts_E) / len(counts_E)
    return [count / even if even else 0.0 for count in counts_E]


def _checked_counts(counts: Any, run: Run) -> list[list[int]]:
    """Return the tokens per expert of each layer; `UserError` if they are something else."""
    try:
        if counts and all(counts_E and all(number(n, run) >= 0 for n in counts_E) for counts_E in counts):
            return [[*counts_E] for counts_E in counts]
    except TypeError:
        pass
    raise broken(run)


def _counts(run: Run) -> list[list[int]] | None:
    """Return the tokens per expert on the validation split: the run's own, or else those of the analysis `routing`."""
    for layers in (run.result.get("layers", {}), run.analyses.get("routing", {}).get("layers", {})):
        for key in ("val/tokens_per_expert", "tokens_per_expert"):
            if isinstance(layers, dict) and key in layers:
                return _checked_counts(layers[key], run)
    return None


def _grid(count: int) -> tuple[int, int]:
    """Return rows and columns of small figures, two in a row so that they can be read on a phone."""
    return ceil(count / 2), min(count, 2)


def _draw(axes: Axes, lines: Sequence[Curve]) -> None:
    marks = 15 if len(lines) <= 6 else 8  # of a line
    for line in lines:
        if line.bands is not None:
            low, high = zip(*line.band_ends, strict=True)
            axes.fill_between(line.xs, low, high, color=color(line.style), alpha=0.16, linewidth=0)
        axes.plot(line.xs, line.means, markevery=max(1, len(line.xs) // marks), **look(line.style))
    axes.margins(x=0.02)


def _mark(axis: Axis, subs: Sequence[float]) -> None:
    """Label a logarithmic axis at these multiples of the powers of ten, in plain numbers."""
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axis.set_minor_formatter(NullFormatter())


def _label(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if x_label.endswith("tokens"):
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _legend_columns(lines: Sequence[Curve]) -> int:
    widest = max((len(_short(line.name)) for line in lines), default=1)
    return max(1, min(len(lines), 66 // (widest + 7)))


def _legend_height(lines: Sequence[Curve]) -> float:
    return 0.18 * (ceil(len(lines) / _legend_columns(lines)) - 1)


def _legend(figure: Figure, lines: Sequence[Curve]) -> None:
    """Draw the legend by hand: names are cut here, and a leading underscore would hide them."""
    handles = [Line2D([], [], **look(line.style)) for line in lines]
    labels = [_short(line.name) for line in lines]
    columns = _legend_columns(lines)
    figure.legend(
        handles, labels, loc="outside upper left", ncols=columns, frameon=False, handlelength=2.2, columnspacing=1.4
    )
