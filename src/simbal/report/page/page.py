"""Writes the page of a sweep, index.html: tables, figures and links in one file that needs no network.

Every text comes from files that anybody may have written: the template escapes them all, and the only markup that goes
in as it is are the figures, which matplotlib has escaped.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup
from matplotlib.figure import Figure

from simbal.files.disk import write_text
from simbal.files.printable import printable
from simbal.report import sections
from simbal.report.arms import Arm
from simbal.report.comparison import Row
from simbal.report.notes import notes
from simbal.report.page import figures, series, tables
from simbal.report.page.figures import loads
from simbal.report.page.looks import COLORS, MOST_ARMS
from simbal.report.page.sensitivity import sensitivity
from simbal.report.page.series import Curve, ShownArm, read
from simbal.report.page.svg import inline, svg
from simbal.report.table import LastSweep, Table

PES = "Cosine between the outputs of two experts, mean over all pairs: lower is less redundant."
WITH_PES = "train with trainer.pes_every=100 (steps between measurements)"
MOST_PANELS = 12
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Card:
    """A figure with its caption, or (`figure` None) in `missing` how to get it."""

    name: str
    title: str
    caption: str
    figure: Figure | None
    missing: str = ""


def write(table: Table, folder: Path) -> None:
    """Write index.html into `folder`, outputs/<name>; `UserError` if one of its files is broken."""
    write_text(folder / "index.html", html(table, folder))


def html(table: Table, folder: Path) -> str:
    """Return the page of a table whose runs lie in `folder`; the same text for the same folder."""
    shown = figure_arms(table)
    differences, bars = tables.differences(table)
    drawn = read(shown, table.baseline)
    found = cards(drawn, sensitivity([row.arm for row in table.rows], table.baseline), f"{folder}")
    text = _template().render(
        table=table,
        notes=notes(table),
        command=LastSweep.of(folder).command,
        tiles=_tiles(table),
        means=sections.means(table, short=True),
        differences=differences,
        bars=bars,
        tokens_to_loss=sections.tokens_to_loss(table),
        without_result=sections.absent(table),
        runs=tables.runs(table),
        config=tables.config_differences(shown),
        figures=[(card, _markup(card)) for card in found if card.figure is not None],
        missing=[card for card in found if card.figure is None],
        shown=shown,
        styles={arm.name: arm.style for arm in drawn},
        num_colors=len(COLORS),
        css=_source("style.css"),
        js=_source("sort.js"),
    )
    return printable(text)


def cards(arms: Sequence[ShownArm], by_key: Sequence[Curve], folder: str) -> list[Card]:
    """Return every figure of a sweep.

    Args:
        arms: with the curves of their runs.
        by_key: the curves that `sensitivity` has found; nothing leaves that figure out.
        folder: outputs/<name>, as a command names it.
    """
    return [*_losses(arms), *_sensitivity(by_key), *_load(arms, folder), *_redundancy(arms), *_analyses(arms, folder)]


def figure_arms(table: Table) -> list[Arm]:
    """Return the arms that figures show: all, or if they are too many the baseline's and the best by loss."""

    def rank(row: Row) -> tuple[bool, float]:
        losses = row.arm.values("val/loss").values()
        return not row.arm.answers_to(table.baseline), sum(losses) / len(losses) if losses else float("inf")

    best = sorted(table.rows, key=rank)[:MOST_ARMS]
    return [row.arm for row in table.rows if row in best]


def _losses(arms: Sequence[ShownArm]) -> list[Card]:
    loss = series.over_tokens(arms, "val/loss")
    caption = "Cross-entropy on the validation split against training tokens."
    axes = ("training tokens", "nats per token")
    found = [_card("loss", "Validation loss", caption, loss, axes, "train a run to its end")]
    if half := series.second_half(loss):
        caption = "The same from half of the tokens on, where arms lie closer."
        found.append(_card("loss-late", "Validation loss, second half", caption, half, axes, ""))
    return found


def _sensitivity(lines: Sequence[Curve]) -> list[Card]:
    caption = "Perplexity at the end of training against a key that arms differ in; a baseline without it is level."
    axes = ("value of the key", "perplexity")
    return [_card("sensitivity", "Sensitivity", caption, lines, axes, "", log=True, log_x=True)] if lines else []


def _load(arms: Sequence[ShownArm], folder: str) -> list[Card]:
    axes, dense = "training tokens", "train a model with experts; a dense one has none"
    used = series.over_tokens(arms, "val/unique_experts")
    uneven = series.over_tokens(arms, "val/max_vio")
    maps = loads(arms)
    caption = "Tokens of the validation split that chose an expert, by the even load. Experts are sorted in each layer "
    caption += "and run, then runs are averaged: the first column is each layer's most used expert, whichever it is."
    again = f"train again, or: python evaluate.py run={folder} analysis=routing" if used else dense
    return [
        _card(
            "experts", "Experts in use",
            "Experts chosen at least once on the validation split, summed over layers.",
            used, (axes, "experts"), dense,
        ),
        _card(
            "max-vio", "Load imbalance",
            "MaxVio: largest load by the mean load, less 1; mean over layers, on the validation split.",
            uneven, (axes, "MaxVio"), dense,
        ),
        Card("loads", "Load of each expert", caption, figures.load_maps(maps) if maps else None, again),
    ]  # fmt: skip


def _redundancy(arms: Sequence[ShownArm]) -> list[Card]:
    by_layer = series.pes_by_layer(arms)
    chosen = _spread(len(by_layer), MOST_PANELS)
    note = f" {len(chosen)} of {len(by_layer)} layers." if len(chosen) < len(by_layer) else ""
    titled = [(f"layer {layer}", by_layer[layer]) for layer in chosen]
    axes = ("training tokens", "PES per million tokens")
    speeds = {key: [c for c in series.rate(arms, f"val/{key}_pes") if c.xs] for key in ("mean", "min")}
    slope = "Difference of two measurements by the tokens between them."
    return [
        Card(
            "pes", "Expert similarity (PES) by layer", f"{PES}{note} {_band(by_layer[0] if by_layer else [])}",
            figures.panels(titled, "training tokens", "PES") if titled else None, WITH_PES,
        ),
        _card("pes-rate-mean", "Rate of change of the mean PES", f"Mean over layers. {slope}", speeds["mean"], axes,
              WITH_PES, zero=True),
        _card("pes-rate-min", "Rate of change of the smallest PES", f"The layer with the smallest PES. {slope}",
              speeds["min"], axes, WITH_PES, zero=True),
    ]  # fmt: skip


def _analyses(arms: Sequence[ShownArm], folder: str) -> list[Card]:
    kinds: list[tuple[str, str, str, Callable[[Sequence[ShownArm]], list[Curve]], str]] = [
        (
            "dropping", "Without each token's best experts",
            "Perplexity when each token loses the experts it would choose first.",
            series.dropping, "experts dropped",
        ),
        (
            "pruning", "Without experts of small weight",
            "Perplexity when chosen experts below a threshold of weight are not computed.",
            series.pruning, "threshold of weight",
        ),
    ]  # fmt: skip
    found = []
    for name, title, caption, points, x_label in kinds:
        curves, missing = points(arms), f"python evaluate.py run={folder} analysis={name}"
        if not series.alike(arms, name):
            curves, missing = [], f"the runs have it with different settings; {missing} overwrite=true"
        found.append(_card(name, title, caption, curves, (x_label, "perplexity"), missing, log=True))
    return found


def _card(
    name: str, title: str, caption: str, curves: Sequence[Curve], axes: tuple[str, str], missing: str, **scale: bool
) -> Card:
    """Return a card of curves; `scale` has `log`, `log_x` and `zero` of figures.curves."""
    caption = f"{caption} {_band(curves)}"
    x_label, y_label = axes
    return Card(name, title, caption, figures.curves(curves, x_label, y_label, **scale) if curves else None, missing)


def _band(curves: Sequence[Curve]) -> str:
    """Return the sentence on how to read the lines."""
    said = f"{series.bands(curves)}."
    if any(curve.bands for curve in curves):
        return f"Line: mean over seeds; {said}"
    return said[0].upper() + said[1:]


def _spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the first `count` whole numbers, the first and the last among them."""
    if count <= most:
        return [*range(count)]
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def _markup(card: Card) -> Markup:
    assert card.figure is not None
    return inline(svg(card.figure, card.name), card.name, card.title)


def _tiles(table: Table) -> list[tuple[str, str]]:
    """Return the numbers for the head of the page, each after what it counts."""
    finished = [run for row in table.rows for run in row.arm.runs]
    absent = Counter(status for _, status, *_ in sections.absent(table).lines)
    tiles = [("arms", f"{len(table.rows):,}"), ("finished runs", f"{len(finished):,}")]
    tiles += [(status, f"{count:,}") for status, count in absent.items()]
    counts = [run.result["tokens"] for run in finished]
    if counts:
        spread = f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
        tiles.append(("training tokens per run", spread))
    return tiles


def _source(name: str) -> Markup:
    """Return a file of this package, to stand in the page as it is."""
    return Markup((HERE / name).read_text(encoding="utf-8"))


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("template.html")
