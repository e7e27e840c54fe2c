"""Curves for the figures: the mean over an arm's seeds at each point, with a band."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, stdev

from simbal.report.arms import Arm
from simbal.report.collect import Run
from simbal.report.comparison import baseline_arms
from simbal.report.statistics import interval, summarize

Points = dict[float, float]  # values by x
MOST_ARMS = 12  # in a figure; more lines are hard to tell apart
PER = 1e6  # rates of change are per this many tokens
BINS = 200  # bins of steps in the training-loss curve
NUM_COLORS = 10
NUM_STYLES = 2 * NUM_COLORS
# strategies with the same style in every study: their index in this list
KNOWN = (
    "lbl", "simbal", "lf", "none", "frozen", "ortho_init", "uniform", "lf_simbal", "lf_lbl", "ortho_mix",
    "lbl_olmoe", "ortho_param", "lf_frozen", "hash", "offdiag_cosine", "row_norm", "lbl_listing", "lbl_hf", "quantile",
    "sinkhorn",
)  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """The mean over the seeds of an arm, with a band if there are several seeds.

    Two arms with the same seeds rise and fall together, so their standard deviations say little about the difference
    between them. With a `rival`, the band is the interval of the paired difference from the rival.
    """

    arm: str
    style: int  # see `arm_styles`
    xs: list[float]
    means: list[float]
    bands: list[float] | None  # half of the height: a standard deviation, or half of the 95% interval of the difference
    rival: str | None = None  # the arm to compare with
    by_seed: dict[int, Points] = field(default_factory=dict)

    @property
    def band_ends(self) -> list[tuple[float, float]]:
        """The lower and the upper end of the band at each x."""
        return [(mean - band, mean + band) for mean, band in zip(self.means, self.bands or (), strict=True)]


@dataclass(frozen=True)
class ShownArm:
    """An arm in the figures."""

    name: str
    style: int
    runs: Sequence[Run]
    rival: str | None  # the arm to compare with


def read_arms(arms: Sequence[Arm], baseline: str | None) -> list[ShownArm]:
    """Read the curves of arms; `UserError` if a file is broken."""
    names = [arm.name for arm in arms]
    rivals = [found[0].name if len(found) == 1 else None for found in baseline_arms(arms, baseline)]
    return [
        ShownArm(name, style, arm.runs, rival if rival != name else None)
        for name, style, arm, rival in zip(names, arm_styles(names), arms, rivals, strict=True)
    ]


def arm_styles(names: Sequence[str]) -> list[int]:
    """Return a different style number for each arm: one of ten colors, solid first, then dashed.

    A strategy in `KNOWN` has the same style in every study. If several arms have the same strategy, the arm without
    other keys in its name gets this style, or else the first arm. Other arms get the remaining styles.

    Args:
        names: names of at most `NUM_STYLES` arms; each begins with the arm's balancing.
    """
    styles: dict[str, int] = {}
    for name in sorted(names, key=lambda name: " " in name):  # names without other keys first
        strategy = name.partition(" ")[0]
        if strategy in KNOWN and KNOWN.index(strategy) not in styles.values():
            styles[name] = KNOWN.index(strategy)
    free = iter([style for style in range(NUM_STYLES) if style not in styles.values()])
    return [styles[name] if name in styles else next(free) for name in names]


def metric_curves(arms: Sequence[ShownArm], key: str) -> list[Curve]:
    """Return the curves of a validation metric or of PES against training tokens."""
    return _mean_curves(arms, lambda run: _points(run, key))


def second_half(arms: Sequence[ShownArm], key: str) -> list[Curve]:
    """Return the curves of a metric from half of the training tokens on, where arms are closer together."""
    half = max((row["tokens"] for arm in arms for run in arm.runs for row in run.rows[-1:]), default=0) / 2
    late = _mean_curves(arms, lambda run: {x: y for x, y in _points(run, key).items() if x >= half})
    return [curve for curve in late if len(curve.xs) > 1]


def training_loss(arms: Sequence[ShownArm]) -> list[Curve]:
    """Return the curves of the training loss, averaged over bins of steps, against training tokens."""
    return _mean_curves(arms, _binned_loss)


def rate_curves(arms: Sequence[ShownArm], key: str) -> list[Curve]:
    """Return the change per million tokens between successive measurements, at the midpoint between them."""

    def slopes(run: Run) -> Points:
        steps = pairwise(_points(run, key).items())
        return {(x + x2) / 2: (y2 - y) / (x2 - x) * PER for (x, y), (x2, y2) in steps}

    return _mean_curves(arms, slopes)


def pes_by_layer(arms: Sequence[ShownArm]) -> list[list[Curve]]:
    """Return the curves of PES against training tokens for each layer."""

    def of_layer(run: Run, layer: int) -> Points:
        measured = ((row["tokens"], row["layers"]["val/pes"]) for row in run.rows if "val/min_pes" in row)
        return {tokens: values[layer] for tokens, values in measured if layer < len(values)}

    by_layer: list[list[Curve]] = []
    while curves := _mean_curves(arms, lambda run: of_layer(run, len(by_layer))):
        by_layer.append(curves)
    return by_layer


def analysis_curves(arms: Sequence[ShownArm], analysis: str) -> list[Curve]:
    """Return perplexity by dropped experts (analysis `dropping`) or by the weight threshold (`pruning`)."""
    x = {"dropping": "drop", "pruning": "threshold"}[analysis]

    def points(run: Run) -> Points:
        content = run.analyses.get(analysis, {})
        entries = content.get("curve", []) if analysis == "dropping" else content.get("arms", {}).values()
        return {entry[x]: entry["ppl"] for entry in entries if None not in (entry[x], entry["ppl"])}

    return _mean_curves(arms, points)


def expert_loads(arms: Sequence[ShownArm]) -> dict[str, list[list[float]]]:
    """Return each expert's load divided by the mean load of its layer, in the first run of each arm.

    Loads come from the run's last validation, or else from its analysis `routing`.
    """
    loads: dict[str, list[list[float]]] = {}
    for arm in arms:
        for run in arm.runs:
            validated = run.result.get("layers", {}).get("val/tokens_per_expert")
            analyzed = run.analyses.get("routing", {}).get("layers", {}).get("tokens_per_expert")
            if arm.name not in loads and (counts_LE := validated or analyzed):
                loads[arm.name] = [[n / (fmean(counts_E) or 1) for n in counts_E] for counts_E in counts_LE]
    return loads


def describe_bands(curves: Sequence[Curve]) -> str:
    """Return a sentence about the bands around the lines."""
    rivals = dict.fromkeys(curve.rival for curve in curves if curve.rival)
    unpaired = [curve.arm for curve in curves if curve.bands and not curve.rival]
    bands = [f"95% interval of the paired difference from {' or '.join(rivals)}"] if rivals else []
    if unpaired:
        bands.append((f"{', '.join(unpaired)}: " if rivals else "") + "± one standard deviation over seeds")
    return f"Mean over seeds; band: {'; '.join(bands)}." if bands else "One seed per arm, so no bands."


def _binned_loss(run: Run) -> Points:
    """Average the training loss over at most `BINS` equal bins of steps, each at the tokens of its last step.

    Runs of equal length have the same bins, so that seeds can be averaged. An unfinished bin is left out.
    """
    steps = [row for row in run.rows if "train/ce" in row and row["step"]]
    if not steps:
        return {}
    max_steps, last = run.rows[-1]["step"], steps[-1]
    size = math.ceil(max_steps / BINS)
    losses: dict[int, list[float]] = defaultdict(list)  # by the last step of the bin
    for row in steps:
        losses[min(math.ceil(row["step"] / size) * size, max_steps)].append(row["train/ce"])
    tokens_per_step = last["tokens"] / last["step"]
    return {end * tokens_per_step: fmean(each) for end, each in losses.items() if end <= last["step"]}


def _mean_curves(arms: Sequence[ShownArm], points: Callable[[Run], Points]) -> list[Curve]:
    """Return the mean curve of each arm with points, at the xs that all its runs share."""
    points_of_arm = {arm.name: {run.seed: values for run in arm.runs if (values := points(run))} for arm in arms}
    curves = []
    for arm in arms:
        by_seed = points_of_arm[arm.name]
        xs = sorted(set.intersection(*map(set, by_seed.values()))) if by_seed else []
        if not xs:
            continue
        means = [fmean(values[x] for values in by_seed.values()) for x in xs]
        bands, rival = None, None
        if len(by_seed) > 1:
            bands = _paired_bands(xs, by_seed, points_of_arm.get(arm.rival or "", {}))
            rival = arm.rival if bands else None
            bands = bands or [stdev(values[x] for values in by_seed.values()) for x in xs]
        curves.append(Curve(arm.name, arm.style, xs, means, bands, rival, by_seed))
    rivals = {curve.rival for curve in curves}  # no band for the rival itself: it would mean something else
    return [replace(curve, bands=None) if curve.arm in rivals else curve for curve in curves]


def _paired_bands(xs: Sequence[float], own: dict[int, Points], rival: dict[int, Points]) -> list[float] | None:
    """Return half of the 95% interval of the mean difference at each x; None if the rival lacks a seed or an x."""
    if not all(seed in rival and rival[seed].keys() >= set(xs) for seed in own):
        return None
    halves = []
    for x in xs:
        differences = summarize([values[x] - rival[seed][x] for seed, values in own.items()])
        low, high = interval(differences) if differences else (None, None)
        assert low is not None and high is not None  # noqa: PT018 - `own` has several seeds
        halves.append((high - low) / 2)
    return halves


def _points(run: Run, key: str) -> Points:
    return {row["tokens"]: row[key] for row in run.rows if key in row}
