"""The figures of a sweep with their captions, and the files that `figures=true` writes."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simbal.commands import format_command
from simbal.metrics.definitions import Metric
from simbal.report import curves
from simbal.report.charts import Figure, Forest, Interval, Lines, Loads, evenly_spaced, pdf, svg
from simbal.report.columns import unlike_settings
from simbal.report.comparison import Row
from simbal.report.curves import MOST_ARMS, Curve, ShownArm
from simbal.report.sections import comparison_name, difference_cells, on_scale
from simbal.report.statistics import UNRESOLVED
from simbal.report.table import Table
from simbal.runs.atomic import explain_write_errors, write_text

TOKENS, NATS, RATE = "training tokens", "nats per token", "PES per million tokens"
MOST_INTERVALS = 40  # arms in a figure of differences
MOST_PANELS, MOST_LINES = 12, 48  # layers with a panel of PES, and lines in all panels together
FINISH = "finish a run"
NEEDS_EXPERTS = "train a model with experts"
NEEDS_PES = "train with trainer.pes_every=100 (steps between measurements)"
SLOPE = "Difference between successive measurements divided by the tokens between them."


@dataclass(frozen=True)
class Card:
    """A figure with its caption. If `figure` is None, `missing` says how to get it."""

    name: str
    title: str
    caption: str
    figure: Figure | None
    missing: str = ""


def cards(table: Table, folder: Path) -> list[Card]:
    """Return every figure of a sweep, differences first; `UserError` if a file of curves is broken.

    Args:
        table: the table of the sweep.
        folder: outputs/<name>, for the commands in `missing`.
    """
    arms = curves.read_arms([row.arm for row in table.best_arms(MOST_ARMS).rows], table.baseline)
    loss = curves.metric_curves(arms, "val/loss")
    used = curves.metric_curves(arms, "val/unique_experts")
    all_cards = [
        *_difference_cards(table),
        _lines(
            "loss", "Validation loss", "Cross-entropy on the validation split.", loss, NATS, FINISH,
            levels=table.ngram_losses,
        ),
        _lines(
            "loss-late", "Validation loss, second half", "After half of the tokens.",
            curves.second_half(arms, "val/loss"), NATS,
        ),
        _lines(
            "training-loss", "Training loss",
            f"Cross-entropy on the training batches, averaged within at most {curves.BINS} bins of steps.",
            curves.training_loss(arms), NATS, FINISH,
        ),
        _lines(
            "experts", "Experts in use", "Experts chosen at least once on the validation split, summed over layers.",
            used, "experts", NEEDS_EXPERTS,
        ),
        _lines(
            "max-vio", "Load imbalance",
            "MaxVio: largest load divided by the mean load, minus 1, on the validation split; mean over layers.",
            curves.metric_curves(arms, "val/max_vio"), "MaxVio", NEEDS_EXPERTS,
        ),
        _load_card(arms, folder, bool(used)),
        _pes_card(arms),
        _lines(
            "pes-rate-mean", "Rate of change of the mean PES", f"Mean over layers. {SLOPE}",
            curves.rate_curves(arms, "val/mean_pes"), RATE, NEEDS_PES, zero=True,
        ),
        _lines(
            "pes-rate-min", "Rate of change of the smallest PES", f"The layer with the smallest PES. {SLOPE}",
            curves.rate_curves(arms, "val/min_pes"), RATE, NEEDS_PES, zero=True,
        ),
        _analysis_card(
            arms, folder, "dropping", "Expert dropping",
            "Perplexity if the experts with the highest scores are dropped for each token.", "experts dropped",
        ),
        _analysis_card(
            arms, folder, "pruning", "Expert pruning",
            "Perplexity if chosen experts with a weight below a threshold are skipped.", "weight threshold",
        ),
    ]  # fmt: skip
    return [card for card in all_cards if card.figure or card.missing]


def interval(table: Table, row: Row, metric: Metric) -> Interval:
    """Return a difference in one metric, with text such as `+0.3% [+0.1%, +0.5%] worse`."""
    difference = row.differences[metric.key]
    cells = difference_cells(metric, difference)
    mean, ends = cells["difference"], cells["95% interval"]
    low, high = on_scale(difference, difference.low), on_scale(difference, difference.high)
    assert mean.value is not None
    short = f"{mean.text} {difference.conclusion}".rstrip()
    text = short if low is None else f"{mean.text} [{ends.text.replace(' to ', ', ')}] {difference.conclusion}".rstrip()
    word = difference.conclusion.removeprefix("barely ") or UNRESOLVED  # decides the color
    return Interval(comparison_name(table, row), mean.value, low, high, word, text, short)


def write_figures(shown: Sequence[Card], folder: Path) -> None:
    """Write figures/*.svg, figures/*.pdf and figures/curves.csv into `folder`; `UserError` if writing fails."""
    place = folder / "figures"
    with explain_write_errors(folder):
        place.mkdir(exist_ok=True)
        for card in shown:
            if card.figure:
                write_text(place / f"{card.name}.svg", svg(card.figure))
                (place / f"{card.name}.pdf").write_bytes(pdf(card.figure))
        write_text(place / "curves.csv", curves_csv(shown))


def curves_csv(shown: Sequence[Card]) -> str:
    """Return the numbers of all curves in full precision, one line per point; `band` says what low and high mean."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["figure", "panel", "arm", "x", "mean", "low", "high", "band"])
    for card in shown:
        for panel, panel_curves in card.figure.panels if isinstance(card.figure, Lines) else []:
            for curve in panel_curves:
                ends = curve.band_ends if curve.bands else [("", "")] * len(curve.xs)
                band = f"95% interval of the difference from {curve.rival}" if curve.rival else "standard deviation"
                for x, mean, (low, high) in zip(curve.xs, curve.means, ends, strict=True):
                    lines.writerow([card.name, panel, curve.arm, x, mean, low, high, band if curve.bands else ""])
    return text.getvalue()


def _difference_cards(table: Table) -> list[Card]:
    """Return a figure for each compared metric, with arms from best to worst."""
    forests = []
    for metric in table.metrics:
        rows = [row for row in table.compared if metric.key in row.differences]
        if not rows:
            continue
        rows.sort(key=lambda row: row.differences[metric.key].mean, reverse=metric.better == "higher")
        kept = rows[:MOST_INTERVALS]
        caption = f"The {len(kept)} best of {len(rows):,} arms." if len(kept) < len(rows) else ""
        intervals = [interval(table, row, metric) for row in kept]
        forest = Forest(intervals, f"difference in {metric.title}", metric.ratio)
        forests.append(Card(f"difference-{metric.key.replace('/', '-')}", metric.heading, caption, forest))
    return forests


def _load_card(arms: Sequence[ShownArm], folder: Path, with_experts: bool) -> Card:
    maps = curves.expert_loads(arms)
    caption = (
        "Tokens per expert in the last validation divided by the mean of the layer, in the first run of each arm. "
        "Experts with the same index in different runs are unrelated."
    )
    command = format_command(f"python evaluate.py run={folder} analysis=routing")
    missing = f"train again, or: {command}" if with_experts else NEEDS_EXPERTS
    return Card("loads", "Load of each expert", caption, Loads(maps) if maps else None, missing)


def _pes_card(arms: Sequence[ShownArm]) -> Card:
    """Return PES with a panel for each layer, or for evenly spaced layers if there are many."""
    by_layer = curves.pes_by_layer(arms)
    chosen = evenly_spaced(len(by_layer), max(2, min(MOST_PANELS, MOST_LINES // max(1, len(arms)))))
    panels = [(f"layer {layer}", by_layer[layer]) for layer in chosen]
    caption = "PES: cosine between the outputs of two experts, mean over all pairs; lower is less redundant."
    caption += f" {len(chosen)} of {len(by_layer)} layers." if len(chosen) < len(by_layer) else ""
    caption += f" {curves.describe_bands([curve for _, shown in panels for curve in shown])}"
    figure = Lines(panels, TOKENS, "PES") if panels else None
    return Card("pes", "Expert similarity (PES) by layer", caption, figure, NEEDS_PES)


def _analysis_card(arms: Sequence[ShownArm], folder: Path, name: str, title: str, caption: str, x_label: str) -> Card:
    missing = format_command(f"python evaluate.py run={folder} analysis={name}")
    if unlike_settings(name, [run for arm in arms for run in arm.runs]):
        shown, missing = [], f"the analyses have different settings; {missing} overwrite=true"
    else:
        shown = curves.analysis_curves(arms, name)
    return _lines(name, title, caption, shown, "perplexity", missing, x_label, log=True)


def _lines(
    name: str, title: str, caption: str, shown: Sequence[Curve], y_label: str, missing: str = "", x_label: str = TOKENS,
    **options: Any,
) -> Card:  # fmt: skip
    figure = Lines([("", shown)], x_label, y_label, **options) if shown else None
    return Card(name, title, f"{caption} {curves.describe_bands(shown)}", figure, missing)
