"""The figures of a sweep: what each one shows and its caption, and the files of `figures=true`."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from simbal.commands import format_command
from simbal.files.disk import refusals_of_disk, write_text
from simbal.metrics.definitions import Metric
from simbal.report import curves
from simbal.report.charts import Figure, Forest, Interval, Lines, Loads, spread, write_figure
from simbal.report.comparison import Row
from simbal.report.curves import MOST_ARMS, Curve, ShownArm
from simbal.report.sections import compared, comparison_name, difference_cells, on_scale
from simbal.report.table import Table

FOLDER, CURVES = "figures", "curves.csv"
HEADINGS = ("figure", "panel", "arm", "x", "mean", "low", "high", "band")
TOKENS, NATS = "training tokens", "nats per token"
MOST_INTERVALS = 40  # arms in a figure of differences: the best
MOST_CELLS = 20_000  # of all load maps together; a browser draws as many in two seconds
MOST_PANELS, MOST_LINES = 12, 48  # layers with a panel of PES, and lines in all panels together
RUN = "train a run to its end"
DENSE = "train a model with experts; a dense one has none"
SLOPE = "Difference between two measurements divided by the tokens between them."
WITH_PES = "train with trainer.pes_every=100 (steps between measurements)"


@dataclass(frozen=True)
class Card:
    """A figure with its caption, or (if `figure` is None) in `missing` how to get it."""

    name: str
    title: str
    caption: str
    figure: Figure | None
    missing: str = ""


def cards(table: Table, folder: Path) -> list[Card]:
    """Return every figure of a sweep, differences first.

    Args:
        table: of the sweep.
        folder: outputs/<name>, as the commands in `missing` name it.

    Raises:
        UserError: a file of curves is broken.
    """
    arms = curves.read([row.arm for row in table.of_best(MOST_ARMS).rows], table.baseline)
    loss = curves.over_tokens(arms, "val/loss")
    used, maps = curves.over_tokens(arms, "val/unique_experts"), curves.loads(arms)
    cells = max((sum(map(len, loads_LE)) for loads_LE in maps.values()), default=1)
    kept = dict([*maps.items()][: max(1, MOST_CELLS // cells)])
    late = curves.second_half(loss)
    again = format_command(f"train again, or: python evaluate.py run={folder} analysis=routing") if used else DENSE
    return [
        *_differences(table),
        _card("loss", "Validation loss", "Cross-entropy on the validation split.", loss, NATS, RUN),
        *(
            [_card("loss-late", "Validation loss, second half", "After half of the tokens.", late, NATS)]
            if late else []
        ),
        _card(
            "training-loss", "Training loss",
            f"Cross-entropy on the training batches, averaged over at most {curves.BINS} spans of steps.",
            curves.training_loss(arms), NATS, RUN,
        ),
        _card(
            "experts", "Experts in use", "Experts chosen at least once on the validation split, summed over layers.",
            used, "experts", DENSE,
        ),
        _card(
            "max-vio", "Load imbalance",
            "MaxVio: largest load divided by the mean load, minus 1; mean over layers, on the validation split.",
            curves.over_tokens(arms, "val/max_vio"), "MaxVio", DENSE,
        ),
        Card(
            "loads", "Load of each expert",
            "Tokens of the last validation that chose an expert, divided by the mean of the layer, in the first run of "
            "each arm. Experts of different runs with the same index are unrelated."
            + (f" {len(kept)} of {len(maps)} arms." if len(kept) < len(maps) else ""),
            Loads(kept) if kept else None, again,
        ),
        _similarity(arms),
        _card(
            "pes-rate-mean", "Rate of change of the mean PES", f"Mean over layers. {SLOPE}",
            curves.rate(arms, "val/mean_pes"), "PES per million tokens", WITH_PES, zero=True,
        ),
        _card(
            "pes-rate-min", "Rate of change of the smallest PES", f"The layer with the smallest PES. {SLOPE}",
            curves.rate(arms, "val/min_pes"), "PES per million tokens", WITH_PES, zero=True,
        ),
        _analysis(
            arms, folder, "dropping", "Without each token's best experts",
            "Perplexity if each token loses the experts that it would choose first.", "experts dropped",
        ),
        _analysis(
            arms, folder, "pruning", "Without experts of small weight",
            "Perplexity if chosen experts with a weight below a threshold are skipped.", "threshold of the weight",
        ),
    ]  # fmt: skip


def interval(table: Table, row: Row, metric: Metric) -> Interval:
    """Return the difference of a row of a table in one metric, with its texts such as `+0.3% [+0.1%, +0.5%] worse`."""
    difference = row.differences[metric.key]
    mean, ends, *_ = difference_cells(metric, difference)
    low, high = on_scale(difference, difference.low), on_scale(difference, difference.high)
    assert mean.value is not None
    short = f"{mean.text} {difference.conclusion}"
    text = short if low is None else f"{mean.text} [{ends.text.replace(' to ', ', ')}] {difference.conclusion}"
    return Interval(comparison_name(table, row), mean.value, low, high, difference.conclusion, text, short)


def write_figures(shown: Sequence[Card], folder: Path) -> None:
    """Write figures/*.svg, figures/*.pdf and figures/curves.csv into `folder`; `UserError` if the disk refuses."""
    place = folder / FOLDER
    with refusals_of_disk(folder):
        place.mkdir(exist_ok=True)
    for card in shown:
        if card.figure:
            write_figure(card.figure, place, card.name)
    write_text(place / CURVES, curves_csv(shown))


def curves_csv(shown: Sequence[Card]) -> str:
    """Return the numbers of all curves in full precision, a line per point; `band` says what low and high are."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(HEADINGS)
    for card in shown:
        for panel, curve in _by_panel(card.figure):
            ends = curve.band_ends if curve.bands else [("", "")] * len(curve.xs)
            band = f"95% interval of the difference to {curve.rival}" if curve.rival else "standard deviation"
            for x, mean, (low, high) in zip(curve.xs, curve.means, ends, strict=True):
                lines.writerow([card.name, panel, curve.arm, x, mean, low, high, band if curve.bands else ""])
    return text.getvalue()


def _by_panel(figure: Figure | None) -> list[tuple[str, Curve]]:
    panels = figure.panels if isinstance(figure, Lines) else []
    return [(title, curve) for title, of_panel in panels for curve in of_panel]


def _differences(table: Table) -> list[Card]:
    """Return a figure for each metric that is compared, its arms from the best to the worst."""
    found, every = [], compared(table)
    for metric in table.metrics:
        rows = [row for row, m in every if m is metric]
        if not rows:
            continue
        rows.sort(key=lambda row: row.differences[metric.key].mean, reverse=metric.better == "higher")
        kept = rows[:MOST_INTERVALS]
        caption = f"The {len(kept)} best of {len(rows):,} arms." if len(kept) < len(rows) else ""
        forest = Forest(
            [interval(table, row, metric) for row in kept],
            f"difference in {metric.title}",
            metric.ratio,
        )
        found.append(Card(f"difference-{metric.key.replace('/', '-')}", metric.heading, caption, forest))
    return found


def _similarity(arms: Sequence[ShownArm]) -> Card:
    """Return the figure of PES with a panel for each layer, or for layers at even distances where there are many."""
    by_layer = curves.pes_by_layer(arms)
    chosen = spread(len(by_layer), max(2, min(MOST_PANELS, MOST_LINES // max(1, len(arms)))))
    panels = [(f"layer {layer}", by_layer[layer]) for layer in chosen]
    caption = "PES: cosine between the outputs of two experts, mean over all pairs; lower is less redundant."
    caption += f" {len(chosen)} of {len(by_layer)} layers." if len(chosen) < len(by_layer) else ""
    caption += f" {curves.describe_bands([curve for _, shown in panels for curve in shown])}"
    figure = Lines(panels, TOKENS, "PES") if panels else None
    return Card("pes", "Expert similarity (PES) by layer", caption, figure, WITH_PES)


def _analysis(arms: Sequence[ShownArm], folder: Path, name: str, title: str, caption: str, x_label: str) -> Card:
    shown, missing = curves.analysed(arms, name), format_command(f"python evaluate.py run={folder} analysis={name}")
    if not curves.same_settings(arms, name):
        shown, missing = [], f"the runs were analysed with different settings; {missing} overwrite=true"
    return _card(name, title, caption, shown, "perplexity", missing, x_label, log=True)


def _card(
    name: str,
    title: str,
    caption: str,
    shown: Sequence[Curve],
    y_label: str,
    missing: str = "",
    x_label: str = TOKENS,
    log: bool = False,
    zero: bool = False,
) -> Card:
    figure = Lines([("", shown)], x_label, y_label, log, zero=zero) if shown else None
    return Card(name, title, f"{caption} {curves.describe_bands(shown)}", figure, missing)
