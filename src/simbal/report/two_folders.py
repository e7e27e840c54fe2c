"""Compares two sweeps, or two runs: what differs between them first, then one table with the arms of both."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simbal.config.schema import GROUPS
from simbal.config.values import flatten
from simbal.errors import UserError
from simbal.metrics.definitions import Metric
from simbal.report.arms import Arm, group, label_columns, label_of, seed_spans, short_label
from simbal.report.collect import Run, collect, read_run, unlike
from simbal.report.columns import ABSENT, Cell, usual
from simbal.report.comparison import Row, compare, conclude, differences, every_pair
from simbal.report.sections import Section
from simbal.report.table import Table, own
from simbal.runs.folder import is_run
from simbal.runs.spec import result_keys

FOLDER = "folder"  # the label column that tells apart arms which are otherwise equal
RECORDED = ("code", "versions", "device", "threads", "precision", "backend", "data", "definitions", "steps", "tokens")


@dataclass(frozen=True)
class Side:
    """One of the two: a sweep's folder, or a run's, with its runs."""

    name: str
    runs: list[Run]

    @property
    def finished(self) -> list[Run]:
        """The runs whose numbers count."""
        return [run for run in self.runs if run.finished]


def read_sides(first: Path, second: Path) -> tuple[Side, Side]:
    """Return the two sides, named by their folders.

    Raises:
        UserError: they are one folder, one cannot stand in a table of its own, or has no finished run.
    """
    if first.resolve() == second.resolve():
        raise UserError(f"{first} and {second} are one folder, which has no difference to itself")
    names = [path.resolve().name for path in (first, second)]
    if names[0] == names[1]:
        names = [str(first), str(second)]
    sides = []
    for name, path in zip(names, (first, second), strict=True):
        side = Side(name, [read_run(path)] if is_run(path) else collect(path))
        if not side.finished:
            raise UserError(f"{path} has no finished run to compare")
        sides.append(side)
    return sides[0], sides[1]


def what_differs(first: Side, second: Side) -> Section:
    """Return the options, keys and circumstances that are not the same on both sides, with the values of each."""
    ours, theirs = _differing(first.runs), _differing(second.runs)
    chosen_apart = {name for name in GROUPS if ours.get(name) != theirs.get(name)}
    rows = []
    for key in dict.fromkeys([*ours, *theirs]):
        either = ours.get(key), theirs.get(key)
        # that an option is not on the other side says also that its keys are not
        if either[0] == either[1] or (None in either and key.partition(".")[0] in chosen_apart - {key}):
            continue
        rows.append([Cell(key), *(Cell(_shown(key, values)) for values in either)])
    title = f"what differs between {first.name} and {second.name}"
    return Section(title, ["", first.name, second.name], rows, 3)


def why_not(first: Side, second: Side) -> str:
    """Return a sentence on why the two cannot stand in one table; empty if they can."""
    reasons = [why for run in second.finished for why in unlike(first.finished[0], run)]
    seen = [{run.result["tokens"] for run in side.finished} for side in (first, second)]
    if not reasons and seen[0] != seen[1]:
        ours, theirs = (" or ".join(f"{count:,}" for count in sorted(counts)) for counts in seen)
        reasons.append(f"a run of the first was trained on {ours} tokens, and one of the second on {theirs}")
    said = "; ".join(dict.fromkeys(reasons))
    return f"{first.name} and {second.name} cannot be compared: {said}" if said else ""


def build_both(
    first: Side, second: Side, baseline: str | None, metrics: Sequence[Metric] | None, paper: bool,
    margin: float | None, pairs: bool,
) -> Table:  # fmt: skip
    """Build the table of both: each arm's mean, and differences on shared seeds.

    Arms that are equal but for their folder are compared with each other, the second minus the first; without such
    arms, or with a `baseline`, every arm is compared with the baseline, that of its own folder if it has one.

    Args:
        first: a side that can be compared with the second.
        second: the other.
        baseline: a balancing or the name of an arm; None: see above.
        metrics: the columns; None takes the usual ones.
        paper: whether the paper's numbers stand beside ours.
        margin: of equivalence, in nats per token; None takes the runs' own.
        pairs: compare every two arms.

    Raises:
        UserError: as `build` does.
    """
    runs, finished = [*first.runs, *second.runs], [*first.finished, *second.finished]
    metrics = usual(finished) if metrics is None else metrics
    margin = own(runs, "equivalence_margin") if margin is None else margin
    columns = label_columns([run.spec for run in runs])
    sides, shared = _arms((first, second), columns)
    asked = baseline if baseline is not None or shared else own(runs, "baseline")
    rows = _compared(sides, asked, metrics, paper)
    together = not pairs and baseline is None and bool(shared)
    every = every_pair(rows, metrics) if pairs else _same_arms(sides, metrics) if together else []
    if every:
        rows = [replace(row, differences={}, tokens_to_loss=None) for row in rows]
    conclude(every or rows, metrics, margin)
    absent = [(short_label(label_of(run.spec, columns)), run) for run in runs if not run.finished]
    name, of = f"{first.name} and {second.name}", f"equal arms, {second.name} - {first.name},"
    shown = [*columns, *([FOLDER] if shared else [])]
    return Table(
        name, shown, metrics, rows, asked, absent, paper, {}, margin, every, of if together else "every two arms"
    )


def _arms(sides: Sequence[Side], columns: Sequence[str]) -> tuple[tuple[list[Arm], list[Arm]], set[str]]:
    """Return the arms of both sides, labelled by folder if some are otherwise equal, and the names of those."""
    first, second = (group(side.finished, columns) for side in sides)
    shared = {arm.name for arm in first} & {arm.name for arm in second}
    for side, arms in zip(sides, (first, second), strict=True) if shared else ():
        arms[:] = [replace(arm, label={**arm.label, FOLDER: Cell(side.name)}) for arm in arms]
    return (first, second), shared


def _compared(
    sides: tuple[list[Arm], list[Arm]], baseline: str | None, metrics: Sequence[Metric], paper: bool
) -> list[Row]:
    """Return the rows of all arms, each compared with the baseline of its own folder if that has one."""
    rows = []
    for arms in sides:
        alone = any(arm.answers_to(baseline) for arm in arms)
        among = compare(arms if alone else [*sides[0], *sides[1]], baseline, metrics, paper)
        own_arms = {*map(id, arms)}
        rows += [row for row in among if id(row.arm) in own_arms]
    return rows


def _same_arms(sides: tuple[list[Arm], list[Arm]], metrics: Sequence[Metric]) -> list[Row]:
    """Return a row for each arm of the second side that the first has too, by its name without a folder."""
    first, second = ([_of_no_folder(arm) for arm in arms] for arms in sides)
    by_name = {arm.name: arm for arm in second}
    pairs = [(ours, by_name[ours.name]) for ours in first if ours.name in by_name]
    return [Row(theirs, {}, ours, differences(theirs, ours, metrics)) for ours, theirs in pairs]


def _of_no_folder(arm: Arm) -> Arm:
    return replace(arm, label={column: cell for column, cell in arm.label.items() if column != FOLDER})


def _differing(runs: Sequence[Run]) -> dict[str, set[str]]:
    """Return the values of each option, each key that can change a result, and each circumstance in the records."""
    values: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        options = {name: run.spec.choices.get(name) for name in GROUPS if name != "logger"}
        recorded = flatten({key: run.result[key] for key in RECORDED if key in run.result}) if run.finished else {}
        for key, value in {**options, **result_keys(run.spec.written), **recorded}.items():
            values[key].add(str(value)[:16] if _is_fingerprint(value) else str(value))
    return values


def _shown(key: str, values: Collection[str] | None) -> str:
    if values is None:
        return ABSENT
    return seed_spans(sorted(map(int, values))) if key == "seed" else ", ".join(sorted(values))


def _is_fingerprint(value: Any) -> bool:
    return isinstance(value, str) and len(value) >= 40 and set(value) <= set("0123456789abcdef")
