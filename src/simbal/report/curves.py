"""The curves that figures show: the mean over an arm's seeds at each point, with a band around it."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from simbal.report.arms import Arm
from simbal.report.collect import Run
from simbal.report.comparison import rivals
from simbal.report.statistics import interval, standard_deviation, summarize
from simbal.runs.curves import rows

Points = dict[float, float]  # values by x
MOST_ARMS = 12  # in a figure; more lines cannot be told apart
MOST_RUNS = 100  # seeds of an arm that its curves use: the first
PER = 1e6  # tokens; the unit of rates of change
BINS = 200  # of the training loss: a figure has no room for more
NUM_COLORS = 10
NUM_STYLES = 2 * NUM_COLORS
# strategies that have the same style in every study: their places in this list
KNOWN = (
    "lbl", "simbal", "lf", "none", "frozen", "ortho_init", "uniform", "lf_simbal", "lf_lbl", "ortho_mix",
    "lbl_olmoe", "ortho_param", "lf_frozen", "hash", "offdiag_cosine", "row_norm", "lbl_listing", "lbl_hf", "quantile",
    "sinkhorn",
)  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """The mean over the seeds of an arm, with a band if there are several seeds.

    Two arms with the same seeds rise and fall together, so the standard deviation over seeds says little about the
    distance between their lines. With a `rival`, the band is the interval of the paired difference to it.
    """

    arm: str
    style: int  # as `styles` numbers it
    xs: list[float]
    means: list[float]
    bands: list[float] | None  # half the height: a standard deviation, or half the 95% interval of the difference
    rival: str | None = None  # the arm that the differences are taken to
    by_seed: dict[int, Points] = field(default_factory=dict)

    @property
    def band_ends(self) -> list[tuple[float, float]]:
        """The lower and the upper end of the band at each x."""
        return [(mean - band, mean + band) for mean, band in zip(self.means, self.bands or (), strict=True)]


@dataclass(frozen=True)
class History:
    """A run with the rows of its validations and measurements of PES, and its binned training loss by tokens."""

    run: Run
    rows: list[dict[str, Any]]
    training: Points


@dataclass(frozen=True)
class ShownArm:
    """An arm that the figures show."""

    name: str
    style: int
    histories: list[History]
    rival: str | None  # the arm that it is compared with


def read(arms: Sequence[Arm], baseline: str | None) -> list[ShownArm]:
    """Read the curves of arms that are compared with `baseline`; `UserError` if a file is broken."""
    others = [found[0].name if len(found) == 1 else None for found in rivals(arms, baseline)]
    names = [arm.name for arm in arms]
    return [
        ShownArm(name, style, [_history(run) for run in arm.runs[:MOST_RUNS]], other if other != name else None)
        for name, style, arm, other in zip(names, styles(names), arms, others, strict=True)
    ]


def styles(names: Sequence[str]) -> list[int]:
    """Return a style for each arm, all different: a number for one of ten colours, solid lines first, then dashed.

    A strategy in `KNOWN` keeps its style in every study. If several arms have the same strategy, the arm without other
    keys in its name gets it, or else the first. The other arms get the styles that are left.

    Args:
        names: of at most `NUM_STYLES` arms; a name begins with its balancing.
    """
    found: dict[str, int] = {}
    for name in sorted(names, key=lambda name: " " in name):  # stable: names of one word come first
        strategy = name.partition(" ")[0]
        if strategy in KNOWN and KNOWN.index(strategy) not in found.values():
            found[name] = KNOWN.index(strategy)
    free = iter([style for style in range(NUM_STYLES) if style not in found.values()])
    return [found[name] if name in found else next(free) for name in names]


def over_tokens(arms: Sequence[ShownArm], key: str) -> list[Curve]:
    """Return the curves of a number from validations or PES measurements against training tokens."""
    return _curves(arms, lambda history: _points(history, key))


def second_half(curves: Sequence[Curve]) -> list[Curve]:
    """Return the parts of curves from half of the largest x on, where arms lie closer together."""
    half = max((curve.xs[-1] for curve in curves), default=0) / 2
    found = []
    for curve in curves:
        kept = [place for place, x in enumerate(curve.xs) if x >= half]
        if len(kept) > 1:
            xs, means = ([values[place] for place in kept] for values in (curve.xs, curve.means))
            bands = curve.bands and [curve.bands[place] for place in kept]
            found.append(replace(curve, xs=xs, means=means, bands=bands))
    return found


def training_loss(arms: Sequence[ShownArm]) -> list[Curve]:
    """Return the curves of the training loss against training tokens, averaged over short spans of steps."""
    return _curves(arms, lambda history: history.training)


def rate(arms: Sequence[ShownArm], key: str) -> list[Curve]:
    """Return the change per million tokens between one measurement and the next, halfway between them."""

    def slopes(history: History) -> Points:
        steps = pairwise(_points(history, key).items())
        return {(x + x2) / 2: (y2 - y) / (x2 - x) * PER for (x, y), (x2, y2) in steps}

    return _curves(arms, slopes)


def pes_by_layer(arms: Sequence[ShownArm]) -> list[list[Curve]]:
    """Return the curves of each layer's PES against training tokens."""
    measured = [_pes(history) for arm in arms for history in arm.histories]
    depth = max((len(values) for found in measured for values in found.values()), default=0)

    def of_layer(layer: int) -> list[Curve]:
        return _curves(arms, lambda h: {x: values[layer] for x, values in _pes(h).items() if layer < len(values)})

    return [of_layer(layer) for layer in range(depth)]


def analysed(arms: Sequence[ShownArm], analysis: str) -> list[Curve]:
    """Return the perplexities of `dropping` by experts dropped, or of `pruning` by the threshold of the weight."""
    key, x = {"dropping": ("curve", "drop"), "pruning": ("arms", "threshold")}[analysis]

    def points(history: History) -> Points:
        found = history.run.analyses.get(analysis, {}).get(key, [])
        entries = found.values() if isinstance(found, dict) else found
        return {entry[x]: entry["ppl"] for entry in entries if None not in (entry[x], entry["ppl"])}

    return _curves(arms, points)


def loads(arms: Sequence[ShownArm]) -> dict[str, list[list[float]]]:
    """Return the load of each expert of each layer, divided by the layer's mean, in the first run of each arm.

    The tokens per expert are those of the run's last validation, or of its analysis `routing`.
    """
    found: dict[str, list[list[float]]] = {}
    for arm in arms:
        for history in arm.histories:
            if arm.name not in found and (counts_LE := _counts(history.run)):
                found[arm.name] = [[n / (fmean(counts_E) or 1) for n in counts_E] for counts_E in counts_LE]
    return found


def same_settings(arms: Sequence[ShownArm], analysis: str) -> bool:
    """Whether every run that has the analysis was analysed with the same settings."""
    runs = [history.run for arm in arms for history in arm.histories if analysis in history.run.analyses]
    return all(run.analyses[analysis]["settings"] == runs[0].analyses[analysis]["settings"] for run in runs)


def describe_bands(curves: Sequence[Curve]) -> str:
    """Return the sentence that says what the bands around the lines are."""
    compared = dict.fromkeys(curve.rival for curve in curves if curve.rival)
    alone = [curve.arm for curve in curves if curve.bands and not curve.rival]
    found = [f"95% interval of the paired difference to {' or '.join(compared)}"] if compared else []
    if alone:
        found.append((f"{', '.join(alone)}: " if compared else "") + "± one standard deviation over seeds")
    return f"Mean over seeds; band: {'; '.join(found)}." if found else "One seed per arm, so no bands."


def _history(run: Run) -> History:
    found = sorted(rows(run.path), key=lambda row: row["tokens"])
    return History(run, [row for row in found if "val/loss" in row or "val/min_pes" in row], _binned_loss(found))


def _binned_loss(found: Sequence[dict[str, Any]]) -> Points:
    """Return the mean training loss in at most `BINS` equal spans of steps, at the tokens of a span's last step.

    Runs with the same number of steps have the same spans, so that seeds can be averaged. A span that the run has not
    finished is left out.
    """
    steps = [row for row in found if "train/ce" in row and row["step"]]  # a validation has no training loss
    if not steps:
        return {}
    max_steps, last = found[-1]["step"], steps[-1]
    span = max(1, math.ceil(max_steps / BINS))
    losses: dict[int, list[float]] = defaultdict(list)  # by the last step of the span
    for row in steps:
        losses[min(math.ceil(row["step"] / span) * span, max_steps)].append(row["train/ce"])
    tokens_per_step = last["tokens"] / last["step"]
    return {end * tokens_per_step: fmean(each) for end, each in losses.items() if end <= last["step"]}


def _curves(arms: Sequence[ShownArm], points: Callable[[History], Points]) -> list[Curve]:
    """Return the curve of each arm that has points, at the places that all its runs share.

    A mean over different seeds at each place would jump.
    """
    found = {arm.name: _by_seed(arm, points) for arm in arms}
    curves = []
    for arm in arms:
        by_seed = found[arm.name]
        xs = sorted(set.intersection(*map(set, by_seed.values()))) if by_seed else []
        if not xs:
            continue
        means = [fmean(values[x] for values in by_seed.values()) for x in xs]
        bands, rival = None, None
        if len(by_seed) > 1:
            bands = _paired(xs, by_seed, found.get(arm.rival or "", {}))
            rival = arm.rival if bands else None
            bands = bands or [standard_deviation([values[x] for values in by_seed.values()]) for x in xs]
        curves.append(Curve(arm.name, arm.style, xs, means, bands, rival, by_seed))
    compared_with = {curve.rival for curve in curves}  # their own band would be a second kind of interval
    return [replace(curve, bands=None) if curve.arm in compared_with else curve for curve in curves]


def _by_seed(arm: ShownArm, points: Callable[[History], Points]) -> dict[int, Points]:
    return {history.run.seed: found for history in arm.histories if (found := points(history))}


def _paired(xs: Sequence[float], own: dict[int, Points], rival: dict[int, Points]) -> list[float] | None:
    """Return half the 95% interval of the mean difference at each x; None unless the rival has all seeds and xs."""
    if not all(seed in rival and rival[seed].keys() >= set(xs) for seed in own):
        return None
    halves = []
    for x in xs:
        differences = summarize([values[x] - rival[seed][x] for seed, values in own.items()])
        low, high = interval(differences) if differences else (None, None)
        assert low is not None and high is not None  # noqa: PT018 - `own` has several seeds
        halves.append((high - low) / 2)
    return halves


def _points(history: History, key: str) -> Points:
    return {row["tokens"]: row[key] for row in history.rows if key in row}


def _pes(history: History) -> dict[float, list[float]]:
    return {row["tokens"]: row["layers"]["val/pes"] for row in history.rows if "val/min_pes" in row}


def _counts(run: Run) -> list[list[int]] | None:
    own = run.result.get("layers", {}).get("val/tokens_per_expert")
    analysed: list[list[int]] | None = run.analyses.get("routing", {}).get("layers", {}).get("tokens_per_expert")
    return own or analysed
