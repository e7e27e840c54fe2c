"""The curves of a sweep's arms as plain numbers, each a mean over seeds, which the figures draw."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from simbal.errors import UserError
from simbal.report.arms import Arm
from simbal.report.collect import Run
from simbal.report.comparison import rivals
from simbal.report.page.styles import styles
from simbal.report.statistics import interval, standard_deviation, summarize
from simbal.runs.curves import rows

Point = tuple[float, float]
MOST_RUNS = 100  # of an arm that its lines are of: the first
PER = 1e6  # tokens; of rates of change
BINS = 200  # of the training loss, as many as a figure has room for


@dataclass(frozen=True)
class History:
    """A run with its validations and its measurements of PES, by tokens, and with its training loss."""

    run: Run
    rows: list[dict[str, Any]]
    training: list[Point] = field(default_factory=list)  # of `_training`


@dataclass(frozen=True)
class ShownArm:
    """An arm that the figures show."""

    name: str
    style: int  # as in `styles.look`
    histories: tuple[History, ...]
    rival: "ShownArm | None" = None  # the one that it is compared with


@dataclass(frozen=True)
class Curve:
    """A curve of means over seeds, with a band where there are several seeds.

    Arms that share their seeds rise and fall together, so that the standard deviation over seeds says little of the
    distance between two lines. With `rival`, the band is that of the paired difference to it.
    """

    name: str
    style: int
    xs: list[float]
    means: list[float]
    bands: list[float] | None  # half their height: a standard deviation over seeds, or with `rival` what `_paired` says
    rival: str | None = None  # the name of the arm that the bands are of the differences to

    @property
    def band_ends(self) -> list[Point]:
        """The lower and the upper end of the band at each x."""
        return [(mean - band, mean + band) for mean, band in zip(self.means, self.bands or (), strict=True)]


def read(arms: Sequence[Arm], baseline: str | None) -> list[ShownArm]:
    """Return the arms with the curves of their runs.

    Args:
        arms: that the figures show.
        baseline: what the table compares with.

    Raises:
        UserError: a file is broken.
    """
    alone = {
        arm.name: ShownArm(arm.name, style, tuple(map(_history, arm.runs[:MOST_RUNS])))
        for style, arm in zip(styles([arm.name for arm in arms]), arms, strict=True)
    }
    return [
        replace(shown, rival=alone[others[0].name]) if len(others) == 1 and others[0].name != shown.name else shown
        for shown, others in zip(alone.values(), rivals(arms, baseline), strict=True)
    ]


def bands(curves: Sequence[Curve]) -> str:
    """Return the sentence on what the bands around the lines are of."""
    rivals = dict.fromkeys(curve.rival for curve in curves if curve.rival)
    alone = [curve.name for curve in curves if curve.bands and not curve.rival]
    said = [f"95% interval of the paired difference to {' or '.join(rivals)}"] if rivals else []
    if alone:
        said.append((f"of {', '.join(alone)}: " if rivals else "") + "± one standard deviation over seeds")
    return f"band: {'; '.join(said)}" if said else "one seed for each arm, so no bands"


def _history(run: Run) -> History:
    """Return what figures show of metrics.jsonl: the rows of training steps, most of a file, for their loss alone."""
    found = sorted(rows(run.path), key=lambda row: row["tokens"])
    kept = [row for row in found if "val/loss" in row or "val/min_pes" in row]
    return History(run, kept, _training(run, found))


def _training(run: Run, found: Sequence[dict[str, Any]]) -> list[Point]:
    """Return the mean training loss of each of at most `BINS` equal spans of steps, at the tokens of its last step.

    The spans are the same in every run of as many steps, so that seeds can be averaged.
    """
    steps = [row for row in found if "train/ce" in row and row["step"]]  # a validation has no training loss
    if not steps:
        return []
    max_steps, last = found[-1]["step"], steps[-1]
    span = max(1, math.ceil(max_steps / BINS))
    losses: dict[int, list[float]] = defaultdict(list)  # by the last step of the span
    for row in steps:
        losses[min(math.ceil(row["step"] / span) * span, max_steps)].append(number(row["train/ce"], run))
    tokens_per_step = last["tokens"] / last["step"]
    return [(end * tokens_per_step, fmean(each)) for end, each in losses.items() if end <= last["step"]]


def over_tokens(arms: Sequence[ShownArm], key: str) -> list[Curve]:
    """Return the curves of a number of the validations, or of PES, against training tokens."""
    return _curves(arms, lambda history: _points(history, key))


def training_loss(arms: Sequence[ShownArm]) -> list[Curve]:
    """Return the curves of the training loss against training tokens, averaged over short spans of steps."""
    return _curves(arms, lambda history: history.training)


def rate(arms: Sequence[ShownArm], key: str) -> list[Curve]:
    """Return the change per million tokens between one measurement and the next, halfway between them."""

    def slopes(history: History) -> list[Point]:
        points = _points(history, key)
        return [((x + x2) / 2, (y2 - y) / (x2 - x) * PER) for (x, y), (x2, y2) in pairwise(points) if x2 > x]

    return _curves(arms, slopes)


def pes_by_layer(arms: Sequence[ShownArm]) -> list[list[Curve]]:
    """Return, for each layer, the curves of its PES against training tokens."""
    depths = [len(_pes(history, row)) for arm in arms for history in arm.histories for row in _pes_rows(history)]

    def of_layer(layer: int) -> list[Curve]:
        return _curves(
            arms,
            lambda history: [
                (row["tokens"], pes[layer]) for row in _pes_rows(history) if layer < len(pes := _pes(history, row))
            ],
        )

    return [of_layer(layer) for layer in range(max(depths, default=0))]


def dropping(arms: Sequence[ShownArm]) -> list[Curve]:
    """Return the curves of perplexity against the number of best experts that every token lost."""
    return _curves(arms, lambda history: _analysed(history, "dropping", "curve", "drop"))


def pruning(arms: Sequence[ShownArm]) -> list[Curve]:
    """Return the curves of perplexity against the threshold below which chosen experts are not computed."""
    return _curves(arms, lambda history: _analysed(history, "pruning", "arms", "threshold"))


def alike(arms: Sequence[ShownArm], analysis: str) -> bool:
    """Whether the analysis was done with the same settings wherever it was done."""
    runs = [history.run for arm in arms for history in arm.histories]
    settings = [run.analyses[analysis]["settings"] for run in runs if analysis in run.analyses]
    return all(other == settings[0] for other in settings)


def number(value: Any, run: Run) -> float:
    """Return a finite number; `UserError` if the value is something else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise broken(run)
    return float(value)


def broken(run: Run) -> UserError:
    """Return the error for a value of a run that is no number."""
    return UserError(f"{run.path} has a value that is no number in metrics.jsonl, record.json or analysis/")


def _curves(arms: Sequence[ShownArm], points: Callable[[History], list[Point]]) -> list[Curve]:
    """Return the mean curve of each arm, at the places that all its runs with any points have.

    A mean over other seeds at each place would jump.
    """
    curves = []
    for arm in arms:
        by_seed = _by_seed(arm, points)
        xs = sorted(set.intersection(*map(set, by_seed.values()))) if by_seed else []
        if not xs:
            continue
        means = [fmean(of_seed[x] for of_seed in by_seed.values()) for x in xs]
        curve = Curve(arm.name, arm.style, xs, means, None)
        if len(by_seed) > 1:
            paired = arm.rival and _paired(xs, by_seed, _by_seed(arm.rival, points))
            sds = [standard_deviation([of_seed[x] for of_seed in by_seed.values()]) for x in xs]
            curve = replace(curve, bands=paired or sds, rival=arm.rival.name if arm.rival and paired else None)
        curves.append(curve)
    compared_with = {curve.rival for curve in curves}
    return [replace(curve, bands=None) if curve.name in compared_with else curve for curve in curves]


def _by_seed(arm: ShownArm, points: Callable[[History], list[Point]]) -> dict[int, dict[float, float]]:
    return {history.run.seed: dict(found) for history in arm.histories if (found := points(history))}


def _paired(
    xs: Sequence[float], own: dict[int, dict[float, float]], rival: dict[int, dict[float, float]]
) -> list[float] | None:
    """Return half of the 95% interval of the mean difference at each x; None unless the rival has all seeds and xs."""
    if not all(seed in rival and rival[seed].keys() >= set(xs) for seed in own):
        return None
    halves = []
    for x in xs:
        differences = summarize([of_seed[x] - rival[seed][x] for seed, of_seed in own.items()])
        assert differences  # of two seeds at least, so that there is an interval
        low, high = interval(differences)
        assert low is not None
        assert high is not None
        halves.append((high - low) / 2)
    return halves


def _points(history: History, key: str) -> list[Point]:
    return [(row["tokens"], number(row[key], history.run)) for row in history.rows if key in row]


def _pes_rows(history: History) -> list[dict[str, Any]]:
    return [row for row in history.rows if "val/min_pes" in row]


def _pes(history: History, row: dict[str, Any]) -> list[float]:
    try:
        return [number(value, history.run) for value in row["layers"]["val/pes"]]
    except (KeyError, TypeError):
        raise broken(history.run) from None


def _analysed(history: History, name: str, key: str, x: str) -> list[Point]:
    """Return the perplexities of an analysis by `x`, without those that lack one of the two."""
    if name not in history.run.analyses:
        return []
    try:
        entries = history.run.analyses[name][key]
        pairs = [(entry[x], entry["ppl"]) for entry in (entries.values() if isinstance(entries, dict) else entries)]
        return [(number(at, history.run), number(ppl, history.run)) for at, ppl in pairs if None not in (at, ppl)]
    except (KeyError, TypeError):
        raise UserError(f"{history.run.path / 'analysis' / name}.json is broken: delete it and do it again") from None
