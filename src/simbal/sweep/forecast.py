"""What `dry_run=true` prints: what would run, what is done, and how long the rest will take."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.table import Table

from simbal.console import new_grid
from simbal.run_folder import RunFolder
from simbal.run_spec import RunSpec, result_keys
from simbal.sweep.plan import Planned
from simbal.sweep.view import clock

Durations = dict[str, list[float]]  # seconds of finished runs, by arm


def forecast(planned: Sequence[Planned], slots: int) -> tuple[Table, str]:
    """A line for each run; and how long those that are not finished will take, `slots` at once."""
    durations: Durations = defaultdict(list)
    for folder in {entry.attempt.folder.path.parent for entry in planned}:
        _add_durations(durations, folder)
    grid = new_grid("dry run: nothing is started")
    for heading in ("run", "is", "folder"):
        grid.add_column(heading, overflow="fold")
    grid.add_column("expected", justify="right")
    waiting: list[float | None] = []
    for entry in planned:
        expected = ""
        if entry.to_run:
            waiting.append(_expected_seconds(entry, durations))
            expected = "?" if waiting[-1] is None else clock(waiting[-1])
        grid.add_row(entry.attempt.label, entry.kind, entry.attempt.folder.path.name, expected)
    return grid, _total(waiting, slots)


def _total(waiting: Sequence[float | None], slots: int) -> str:
    if not waiting:
        return "Nothing is left to run."
    known = [seconds for seconds in waiting if seconds is not None]
    if len(known) < len(waiting):
        return f"{len(waiting)} to run, {slots} at once; no finished run beside them tells how long they take."
    total = max(sum(known) / slots, *known)
    return f"{len(waiting)} to run, {slots} at once: about {clock(total)}, going by the runs that are finished."


def _expected_seconds(entry: Planned, durations: Durations) -> float | None:
    """As the finished runs of the same arm took, else as all did; less what a broken-off one has done already."""
    alike = durations.get(_arm(entry.attempt.job.spec)) or [s for seconds in durations.values() for s in seconds]
    if not alike:
        return None
    progress = entry.attempt.progress() if entry.kind == "resumed" else {}
    return fmean(alike) * float(1 - progress.get("step", 0) / progress.get("max_steps", 1))


def _add_durations(durations: Durations, folder: Path) -> None:
    """Of the finished runs in outputs/<name>."""
    for file in folder.glob("*/record.json"):
        run = RunFolder(file.parent)
        record = run.whole_record()
        if record is not None and record["status"] == "finished" and "seconds" in record:
            durations[_arm(run.read_spec())].append(float(record["seconds"]))


def _arm(spec: RunSpec) -> str:
    keys = result_keys(spec.config)
    del keys["seed"]
    return json.dumps(keys, sort_keys=True)
