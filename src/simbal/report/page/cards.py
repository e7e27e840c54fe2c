"""The figures of a sweep, each as the curves that it shows, from which it is drawn, and what to read beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from simbal.commands import as_typed
from simbal.report.page import figures, series
from simbal.report.page.chart import Chart, spread
from simbal.report.page.figures import LoadMap, loads
from simbal.report.page.series import Curve, ShownArm

PES = "Cosine between the outputs of two experts, mean over all pairs: lower is less redundant."
WITH_PES = "train with trainer.pes_every=100 (steps between measurements)"
MOST_PANELS, MOST_LINES = 12, 48  # of PES by layer, and of all panels together


@dataclass(frozen=True)
class Card:
    """A figure with its caption, or (`shows` None) in `missing` how to get it."""

    name: str
    title: str
    caption: str
    shows: Chart | Sequence[LoadMap] | None
    missing: str = ""

    @property
    def chart(self) -> Chart | None:
        """The curves that it shows, if it shows any."""
        return self.shows if isinstance(self.shows, Chart) else None

    def figure(self) -> Figure:
        """Draw what it shows."""
        assert self.shows is not None
        return self.shows.figure() if isinstance(self.shows, Chart) else figures.load_maps(self.shows)


def cards(arms: Sequence[ShownArm], folder: str) -> list[Card]:
    """Return every figure of a sweep.

    Args:
        arms: with the curves of their runs.
        folder: outputs/<name>, as a command names it.
    """
    return [*_losses(arms), *_load(arms, folder), *_redundancy(arms), *_analyses(arms, folder)]


def _losses(arms: Sequence[ShownArm]) -> list[Card]:
    loss, training = series.over_tokens(arms, "val/loss"), series.training_loss(arms)
    axes, how = ("training tokens", "nats per token"), "train a run to its end"
    caption = "Cross-entropy on the validation split against training tokens."
    trained = f"Cross-entropy on the training batches, averaged over at most {series.BINS} spans of steps."
    return [
        _card("loss", "Validation loss", caption, loss, axes, how),
        _card("training-loss", "Training loss", trained, training, axes, how),
    ]


def _load(arms: Sequence[ShownArm], folder: str) -> list[Card]:
    axes, dense = "training tokens", "train a model with experts; a dense one has none"
    used = series.over_tokens(arms, "val/unique_experts")
    uneven = series.over_tokens(arms, "val/max_vio")
    maps = loads(arms)
    caption = "Tokens of the last validation that chose an expert, by the even load, in one run of each arm: "
    caption += "a column is one expert by its index, which means something else in every run."
    again = as_typed(f"train again, or: python evaluate.py run={folder} analysis=routing") if used else dense
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
        Card("loads", "Load of each expert", caption, maps or None, again),
    ]  # fmt: skip


def _redundancy(arms: Sequence[ShownArm]) -> list[Card]:
    by_layer = series.pes_by_layer(arms)
    chosen = spread(len(by_layer), max(2, min(MOST_PANELS, MOST_LINES // max(1, len(arms)))))
    note = f" {len(chosen)} of {len(by_layer)} layers." if len(chosen) < len(by_layer) else ""
    titled = [(f"layer {layer}", by_layer[layer]) for layer in chosen]
    axes = ("training tokens", "PES per million tokens")
    speeds = {key: [c for c in series.rate(arms, f"val/{key}_pes") if c.xs] for key in ("mean", "min")}
    slope = "Difference of two measurements by the tokens between them."
    return [
        Card(
            "pes", "Expert similarity (PES) by layer", f"{PES}{note} {_band(by_layer[0] if by_layer else [])}",
            Chart(titled, "training tokens", "PES") if titled else None, WITH_PES,
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
        curves, missing = points(arms), as_typed(f"python evaluate.py run={folder} analysis={name}")
        if not series.alike(arms, name):
            curves, missing = [], f"the runs have it with different settings; {missing} overwrite=true"
        found.append(_card(name, title, caption, curves, (x_label, "perplexity"), missing, log=True))
    return found


def _card(
    name: str,
    title: str,
    caption: str,
    curves: Sequence[Curve],
    axes: tuple[str, str],
    missing: str,
    log: bool = False,
    zero: bool = False,
) -> Card:
    """Return a card of curves."""
    caption = f"{caption} {_band(curves)}"
    return Card(name, title, caption, Chart([("", curves)], *axes, log, zero) if curves else None, missing)


def _band(curves: Sequence[Curve]) -> str:
    """Return the sentence on how to read the lines."""
    said = f"{series.bands(curves)}."
    if any(curve.bands for curve in curves):
        return f"Line: mean over seeds; {said}"
    return said[0].upper() + said[1:]
