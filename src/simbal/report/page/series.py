"""The curves of a sweep's arms as plain numbers, each a mean over seeds, which the figures draw."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from simbal.errors import UserError
from simbal.report.arms import Arm
from simbal.report.collect import Run
from simbal.runs.curves import rows

Point = tuple[float, float]
PER = 1e6  # tokens; of rates of change


@dataclass(frozen=True)
class History:
    """A finished run with its validations and its measurements of PES, by tokens."""

    run: Run
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class ShownArm:
    """An arm that the figures show; `style` numbers its colour and its marker in all of them."""

    name: str
    style: int
    histories: tuple[History, ...]


@dataclass(frozen=True)
class Curve:
    """A curve of means over seeds, with standard deviations where there are several seeds."""

    name: str
    style: int
    xs: list[float]
    means: list[float]
    sds: list[float] | None


def read(arms: Iterable[Arm]) -> list[ShownArm]:
    """Return the arms with the curves of their runs; `UserError` if a file is broken."""
    return [
        ShownArm(arm.name, style, tuple(History(run, _measured(run)) for run in arm.runs))
        for style, arm in enumerate(arms)
    ]


def _measured(run: Run) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl by tokens, without those of training steps, most of a file."""
    kept = [row for row in rows(run.path) if "val/loss" in row or "val/min_pes" in row]
    return sorted(kept, key=lambda row: row["tokens"])


def over_tokens(arms: Sequence[ShownArm], key: str) -> list[Curve]:
    """Return the curves of a number of the validations, or of PES, against training tokens."""
    return _curves(arms, lambda history: _points(history, key))


def second_half(curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves where they lie close together; those with less than three points there are left out."""
    halves = []
    for curve in curves:
        first = next(place for place, x in enumerate(curve.xs) if x >= curve.xs[-1] / 2)
        sds = curve.sds and curve.sds[first:]
        halves.append(Curve(curve.name, curve.style, curve.xs[first:], curve.means[first:], sds))
    return [half for half in halves if len(half.xs) >= 3]


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
        by_run = [dict(found) for history in arm.histories if (found := points(history))]
        xs = sorted(set.intersection(*map(set, by_run))) if by_run else []
        if xs:
            values = [[of_run[x] for of_run in by_run] for x in xs]
            sds = [stdev(same) for same in values] if len(by_run) > 1 else None
            curves.append(Curve(arm.name, arm.style, xs, [fmean(same) for same in values], sds))
    return curves


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
