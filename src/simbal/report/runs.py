"""List the runs in folders with their status, and print the list."""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from simbal.config.values import flatten
from simbal.console import clock, new_grid
from simbal.errors import UserError
from simbal.report.arms import label_columns, label_of, short_label
from simbal.report.collect import Run, read_run
from simbal.report.sections import status_and_error
from simbal.runs.folder import CONFIG_FILE, CURVES_FILE, RunFolder, is_run
from simbal.runs.record import read_progress

STYLES = {"running": "cyan", "finished": "green", "unfinished": "yellow", "killed": "yellow", "pruned": "yellow"}
PROBLEM = "bold red"  # failed, diverged, damaged
TEXTS = ("arm", "folder", "status")
HEADINGS = (*TEXTS, "seed", "step", "loss", "ppl", "when", "took", "size")
NARROW = ("folder", "status", "step", "loss", "ppl")  # for terminals of fewer than 100 columns


@dataclass(frozen=True)
class ListedRun:
    """A run in a list; `status` comes from its record, or is running, unfinished or damaged."""

    path: Path
    status: str
    error: str = ""  # the reason why it has no result
    run: Run | None = None  # None: its config is damaged
    arm: str = ""  # its label, as in the sweep's table

    @property
    def values(self) -> dict[str, Any]:
        """All known values by name; metrics only for a finished run."""
        run = self.run
        config, record = (run.spec.config, run.record or {}) if run else (None, {})
        progress = record.get("step", read_progress(self.path).get("step"))
        facts = {
            "status": self.status, "arm": self.arm or None, "seed": config and config.seed,
            "step": record["steps"] if self.status == "finished" else progress,
            "steps": config and config.trainer.max_steps, "tokens": record.get("tokens"),
            "when": record.get("ended") or last_written(self.path), "seconds": record.get("seconds"),
            "size": size_on_disk(self.path), "folder": str(self.path), "name": self.path.absolute().parent.name,
            "error": self.error or None,
        }  # fmt: skip
        known = {**run.spec.choices, **flatten(run.spec.written)} if run else {}
        return (run.numbers if run and run.finished else {}) | known | facts


def list_runs(folders: Iterable[Path]) -> list[ListedRun]:
    """Return the runs in runs, sweeps and folders of sweeps, each once, by path; `UserError` for a missing path."""
    sweeps: dict[Path, dict[Path, ListedRun]] = defaultdict(dict)
    for folder in folders:
        if not folder.exists():
            raise UserError(f"there is no folder {folder}")
        for path in [folder, *folder.glob("*"), *folder.glob("*/*")]:
            if is_run(path):
                sweeps[path.absolute().parent][path.absolute()] = list_run(path)
    runs = []
    for listed in sweeps.values():
        columns = label_columns([one.run.spec for one in listed.values() if one.run])
        for one in listed.values():
            runs.append(replace(one, arm=short_label(label_of(one.run.spec, columns))) if one.run else one)
    return sorted(runs, key=lambda one: one.path)


def list_run(path: Path) -> ListedRun:
    """Return a run with its status; a damaged file is not an error."""
    try:
        run = read_run(path)
    except UserError as damage:
        return ListedRun(path, "damaged", str(damage))
    status, error = ("finished", "") if run.finished else status_and_error(run)
    if status in ("unfinished", "killed") and RunFolder(path).is_locked():
        status, error = "running", ""
    return ListedRun(path, status, error, run)


def last_written(path: Path) -> str:
    """Return the time at which a run last wrote a file, in UTC, as ISO 8601."""
    files = [file for file in (path / CURVES_FILE, path / CONFIG_FILE) if file.exists()] or [path]
    last = max(file.stat().st_mtime for file in files)
    return datetime.fromtimestamp(last, UTC).isoformat(timespec="seconds")


def size_on_disk(path: Path) -> int:
    """Return the disk usage of a folder in bytes."""
    total = 0
    for parent, _, files in os.walk(path):
        for name in files:
            with suppress(FileNotFoundError):  # removed since os.walk listed it
                total += os.lstat(Path(parent, name)).st_blocks * 512
    return total


def print_runs(runs: Sequence[dict[str, Any]], more: int, out: Console) -> None:
    """Print the values of runs as a table, the number of hidden runs, and the errors of runs without a result."""
    top = os.path.commonpath([Path(run["folder"]).absolute().parent for run in runs])
    grid = new_grid(f"runs in {os.path.relpath(top)}")
    errors = new_grid("runs without a result", "folder", "status", "error")
    headings = HEADINGS if out.width >= 100 else NARROW
    for heading in headings:
        is_text = heading in TEXTS
        grid.add_column(heading, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for run in runs:
        status = Text(run["status"], STYLES.get(run["status"], PROBLEM))
        cells: dict[str, str | Text] = {
            "folder": os.path.relpath(run["folder"], top),
            "status": status,
            "step": f"{'?' if run['step'] is None else run['step']}/{run['steps']}" if run["steps"] else "",
            "loss": f"{run['val/loss']:.4f}" if run.get("val/loss") else "",
            "ppl": f"{run['val/ppl']:.2f}" if run.get("val/ppl") else "",
            "when": f"{datetime.fromisoformat(run['when']).astimezone():%Y-%m-%d %H:%M}",
            "took": clock(run["seconds"]) if run["seconds"] else "",
            "size": decimal(run["size"]),
        }
        cells |= {key: "" if run[key] is None else str(run[key]) for key in ("arm", "seed")}
        grid.add_row(*(cells[heading] for heading in headings))
        if run["error"]:
            errors.add_row(cells["folder"], status, run["error"])
    out.print(grid)
    if more:
        out.print(f"and {more} more")
    if errors.rows:
        out.print(errors)
