"""Compare two sweeps, or two runs: list the settings that differ, and build one table with the arms of both."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simbal.config.schema import GROUPS
from simbal.config.values import flatten
from simbal.errors import UserError
from simbal.metrics.definitions import Metric
from simbal.report.arms import Arm, group_runs, label_columns, seed_ranges
from simbal.report.collect import Run, collect, difference_in_setting, read_run
from simbal.report.columns import ABSENT, Cell, default_columns
from simbal.report.comparison import compare, every_pair, rows_of_pairs
from simbal.report.sections import Section
from simbal.report.table import Table, absent_runs, shared_config_value
from simbal.runs.folder import is_run
from simbal.runs.spec import result_keys

FOLDER = "folder"  # the label column that tells arms with equal configs apart
HASH = re.compile("[0-9a-f]{40,}")
RECORDED = ("code", "versions", "device", "threads", "precision", "backend", "data", "definitions", "steps", "tokens")


@dataclass(frozen=True)
class Side:
    """One of the two folders, with its runs."""

    name: str
    runs: list[Run]

    @property
    def finished(self) -> list[Run]:
        """The finished runs."""
        return [run for run in self.runs if run.finished]


def read_sides(first: Path, second: Path) -> tuple[Side, Side]:
    """Read two folders, each a sweep or a run; `UserError` if one has no finished run or both are the same folder."""
    if first.resolve() == second.resolve():
        raise UserError(f"{first} and {second} are the same folder")
    same_name = first.resolve().name == second.resolve().name
    sides = []
    for path in (first, second):
        name = str(path) if same_name else path.resolve().name
        side = Side(name, [read_run(path)] if is_run(path) else collect(path))
        if not side.finished:
            raise UserError(f"{path} has no finished run to compare")
        sides.append(side)
    return sides[0], sides[1]


def differing_settings(first: Side, second: Side) -> Section:
    """Return the options, keys and recorded facts, such as versions, that differ, with each side's values."""
    ours, theirs = _settings(first.runs), _settings(second.runs)
    other_options = {name for name in GROUPS if ours.get(name) != theirs.get(name)}
    rows = []
    for key in dict.fromkeys([*ours, *theirs]):
        values = [side.get(key, ABSENT) for side in (ours, theirs)]
        implied = ABSENT in values and key.partition(".")[0] in other_options - {key}  # a key of another option
        if values[0] != values[1] and not implied:
            rows.append([Cell(key), *map(Cell, values)])
    title = f"settings that differ between {first.name} and {second.name}" + ("" if rows else ": none")
    return Section(title, ["", first.name, second.name], rows, 3)


def why_incomparable(first: Side, second: Side) -> str:
    """Return the reason why the runs of both sides cannot be in one table; empty if they can."""
    reason = difference_in_setting(first.finished[0], second.finished[0])  # runs of one side are comparable
    tokens = [{run.result["tokens"] for run in side.finished} for side in (first, second)]
    if not reason and tokens[0] != tokens[1]:
        ours, theirs = (" or ".join(f"{count:,}" for count in sorted(counts)) for counts in tokens)
        reason = f"the first was trained on {ours} tokens and the second on {theirs}"
    return reason and f"{first.name} and {second.name} cannot be compared: {reason}"


def build_both(
    first: Side, second: Side, baseline: str | None = None, metrics: Sequence[Metric] | None = None,
    paper: bool = False, margin: float | None = None, pairs: bool = False,
) -> Table:  # fmt: skip
    """Build a table of both sides.

    Arms with equal configs are compared with each other, the second minus the first. If there are none, or with a
    `baseline`, every arm is compared with the baseline of its own side. For the other arguments see `table.build`.
    """
    runs = [*first.runs, *second.runs]
    metrics = default_columns([run for run in runs if run.finished]) if metrics is None else metrics
    margin = shared_config_value(runs, "equivalence_margin") if margin is None else margin
    columns = label_columns([run.spec for run in runs])
    ours, theirs = (group_runs(side.finished, columns) for side in (first, second))
    by_name = {arm.name: arm for arm in theirs}
    equal = [(by_name[arm.name], arm) for arm in ours if arm.name in by_name]
    arms = [*_with_folder(ours, first), *_with_folder(theirs, second)] if equal else [*ours, *theirs]
    if baseline is None and not equal:
        baseline = shared_config_value(runs, "baseline")
    rows = compare(arms, baseline, metrics, margin, paper)
    compared, pairs_of = [], "every pair of arms"
    if pairs:
        compared = every_pair([row.arm for row in rows], metrics, margin)
    elif baseline is None:
        compared = rows_of_pairs(equal, metrics, margin)
        pairs_of = f"equal arms, {second.name} - {first.name},"
    if compared:
        rows = [replace(row, differences={}, tokens_to_loss=None) for row in rows]
    return Table(
        f"{first.name} and {second.name}", [*columns, FOLDER] if equal else columns, metrics, rows, baseline,
        absent_runs(runs, columns), paper, margin=margin, pairs=compared, pairs_of=pairs_of,
    )  # fmt: skip


def _with_folder(arms: Sequence[Arm], side: Side) -> list[Arm]:
    """Return the arms labeled by their folder; arms of different folders no longer share a baseline."""
    folder = {FOLDER: Cell(side.name)}
    return [replace(arm, label=arm.label | folder, setting=f"{side.name} {arm.setting}") for arm in arms]


def _settings(runs: Sequence[Run]) -> dict[str, str]:
    """Return the options, keys and recorded facts of runs, each with its values; hashes are shortened."""
    values: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        recorded = flatten({key: run.result[key] for key in RECORDED if key in run.result}) if run.finished else {}
        options = {name: option for name, option in run.spec.choices.items() if name != "logger"}
        for key, value in {**options, **result_keys(run.spec.written), **recorded}.items():
            values[key].add(str(value)[:16] if HASH.fullmatch(str(value)) else str(value))
    joined = {key: ", ".join(sorted(texts)) for key, texts in values.items()}
    return joined | {"seed": seed_ranges([*map(int, values["seed"])])}
