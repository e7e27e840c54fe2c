"""Lists the runs below folders, whatever state they are in."""

import os
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from simbal.config.values import flatten
from simbal.errors import UserError
from simbal.report.arms import label_columns, label_of, short_label
from simbal.report.collect import read_analyses
from simbal.runs.folder import CONFIG_FILE, CURVES_FILE, RunFolder, is_run
from simbal.runs.record import error_of, read_progress
from simbal.runs.spec import RunSpec


@dataclass(frozen=True)
class Listed:
    """A run as it was found; `status` is one of a record's, or running, unfinished or damaged."""

    path: Path
    status: str
    error: str = ""  # why it has no result
    spec: RunSpec | None = None
    record: dict[str, Any] = field(default_factory=dict)
    arm: str = ""  # as the table of its sweep labels it

    @property
    def step(self) -> int | None:
        """The step that it has reached, as far as it is known."""
        if self.status == "finished":
            return int(self.record["steps"])
        return self.record.get("step", read_progress(self.path).get("step"))

    @property
    def when(self) -> str:
        """When it ended, or else when it last wrote, in UTC and ISO 8601."""
        files = (self.path / CURVES_FILE, self.path / CONFIG_FILE)
        last = max((file.stat().st_mtime for file in files if file.exists()), default=self.path.stat().st_mtime)
        return str(self.record.get("ended") or datetime.fromtimestamp(last, UTC).isoformat(timespec="seconds"))

    @property
    def values(self) -> dict[str, Any]:
        """Everything that a script may read, by name; numbers only of a finished run."""
        config = self.spec and self.spec.config
        facts = {
            "status": self.status, "arm": self.arm or None, "seed": config and config.seed, "step": self.step,
            "steps": config and config.trainer.max_steps, "tokens": self.record.get("tokens"), "when": self.when,
            "seconds": self.record.get("seconds"), "size": size(self.path), "folder": str(self.path),
            "name": self.path.absolute().parent.name, "error": self.error or None,
        }  # fmt: skip
        if self.spec is None:
            return facts
        return {**self._numbers(), **self.spec.choices, **flatten(self.spec.written), **facts}

    def _numbers(self) -> dict[str, float | None]:
        if self.status != "finished":
            return {}
        numbers = {**self.record["metrics"], "tokens_per_second": self.record["tokens_per_second"]}
        with suppress(UserError):  # the table of its sweep says which analysis is broken
            for name, done in read_analyses(self.path / "analysis").items():
                numbers |= {f"{name}.{key}": number for key, number in done["metrics"].items()}
        return numbers


def runs_below(folders: Iterable[Path]) -> list[Listed]:
    """Return the runs in runs, sweeps and folders of sweeps, each once, by path; `UserError` for a missing folder."""
    sweeps: dict[Path, dict[Path, Listed]] = defaultdict(dict)
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}")
        for path in [folder, *folder.glob("*"), *folder.glob("*/*")]:
            if is_run(path):
                sweeps[path.absolute().parent][path.absolute()] = look(path)
    found = []
    for runs in sweeps.values():
        columns = label_columns([run.spec for run in runs.values() if run.spec])
        for run in runs.values():
            found.append(replace(run, arm=short_label(label_of(run.spec, columns))) if run.spec else run)
    return sorted(found, key=lambda run: run.path)


def look(path: Path) -> Listed:
    """Return a run as it is; no file in it is an error."""
    folder, spec = RunFolder(path), None
    try:
        spec = folder.read_spec()
        record = folder.read_record()
    except UserError as error:
        return Listed(path, "damaged", str(error), spec)
    if (record is None or record["status"] == "killed") and folder.is_locked():
        return Listed(path, "running", spec=spec)
    if record is None:
        return Listed(path, "unfinished", spec=spec)
    return Listed(path, record["status"], error_of(record), spec, record)


def size(path: Path) -> int:
    """Return the bytes that a folder takes on the disk."""
    total = 0
    for parent, _, files in os.walk(path):
        for name in files:
            with suppress(FileNotFoundError):  # removed meanwhile
                total += os.lstat(Path(parent, name)).st_blocks * 512
    return total
