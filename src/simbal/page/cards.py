"""The figures of a sweep with their captions; what has no data says how to get them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from simbal.page import figures, series
from simbal.page.loads import loads
from simbal.page.series import Curve, ShownArm

PES = "Cosine between the outputs of two experts, mean over all pairs: lower is less redundant."
WITH_PES = "train with trainer.pes_every=100 (steps between measurements)"
MOST_PANELS = 12


@dataclass(frozen=True)
class Card:
    """A figure and what it shows, or (`figure` None) `missing`: how to get it."""

    name: str
    title: str
    caption: str
    figure: Figure | None
    missing: str = ""


def cards(arms: Sequence[ShownArm], by_key: Sequence[Curve], folder: str) -> list[Card]:
    """Every figure of a sweep.

    Args:
        arms: with the curves of their runs.
        by_key: what `sensitivity` has found; nothing leaves that figure out.
        folder: outputs/<name>, as a command names it.
    """
    return [*_losses(arms), *_sensitivity(by_key), *_load(arms, folder), *_redundancy(arms), *_analyses(arms, folder)]


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
    caption = "Perplexity at the end of training against a key in which arms differ; arms without it are level lines. "
    caption += "Colours are this figure's own."
    axes = ("value of the key", "perplexity")
    return [_card("sensitivity", "Sensitivity", caption, lines, axes, "", log=True, log_x=True)] if lines else []


def _load(arms: Sequence[ShownArm], folder: str) -> list[Card]:
    axes, dense = "training tokens", "train a model with experts; a dense one has none"
    used = series.over_tokens(arms, "load/unique_experts")
    uneven = series.over_tokens(arms, "load/max_vio")
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
    speeds = {key: [c for c in series.rate(arms, f"pes/{key}") if c.xs] for key in ("mean", "min")}
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
    """`scale`: `log`, `log_x` and `zero` of figures.curves."""
    caption = f"{caption} {_band(curves)}"
    x_label, y_label = axes
    return Card(name, title, caption, figures.curves(curves, x_label, y_label, **scale) if curves else None, missing)


def _band(curves: Sequence[Curve]) -> str:
    """How to read the lines."""
    if any(curve.sds for curve in curves):
        return "Line: mean over seeds; band: ± one standard deviation."
    return "One seed for each arm, so no bands."


def _spread(count: int, most: int) -> list[int]:
    """At most `most` of the first `count` whole numbers, the first and the last among them."""
    if count <= most:
        return [*range(count)]
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]
