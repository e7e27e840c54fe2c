"""Lists the runs below folders, whatever state they are in: a folder that is no run, or a broken one, is said to be so.

Where a table refuses what does not fit, a list shows it.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from simbal.analysis.shared.host_record import is_host
from simbal.config.values import flatten
from simbal.errors import UserError
from simbal.report.arms import label_columns, label_of, short_label
from simbal.report.collect import read_analyses
from simbal.runs.folder import CONFIG_FILE, CURVES_FILE, RECORD_FILE, DamagedRecordError, RunFolder, is_run
from simbal.runs.record import error_of, read_progress
from simbal.runs.spec import RunSpec

OURS = {"analysis", "mlflow"}  # folders of an output_dir that no sweep has made
OF_SWEEPS = ("sweep.json", "study.db", "trials.csv", "table.json")  # by which a folder without a run is a sweep's
DEEPEST = 2  # levels: outputs/<name>/<run>


@dataclass(frozen=True)
class Listed:
    """A folder as it was found.

    `status` is one of a record's, or running, unfinished, damaged (a part of it is not what the run has written), or
    foreign (no run).
    """

    path: Path
    status: str
    error: str = ""  # why it has no result
    spec: RunSpec | None = None
    record: dict[str, Any] = field(default_factory=dict)
    arm: str = ""  # as the table of its sweep labels it
    said: dict[str, Any] = field(default_factory=dict)  # progress.json

    @property
    def step(self) -> int | None:
        """The step that it has reached, as far as it is known."""
        if self.status == "finished":
            return int(self.record["steps"])
        return self.record.get("step", self.said.get("step"))

    @property
    def steps(self) -> int | None:
        """The steps that its config asks for."""
        return self.spec.config.trainer.max_steps if self.spec else None

    @property
    def when(self) -> str | None:
        """When it ended, or else when its folder last changed, in UTC as ISO 8601 has it."""
        if ended := self.record.get("ended"):
            return str(ended)
        changed = [_changed(self.path / name) for name in (CURVES_FILE, RECORD_FILE, CONFIG_FILE, "")]
        last = max((time for time in changed[:-1] if time is not None), default=changed[-1])
        return None if last is None else datetime.fromtimestamp(last, UTC).isoformat(timespec="seconds")

    @property
    def seconds(self) -> float | None:
        """How long it took; of one that was broken off, its last process."""
        if "seconds" in self.record:
            return float(self.record["seconds"])
        try:
            times = [datetime.fromisoformat(self.record[key]) for key in ("started", "ended")]
            return (times[1] - times[0]).total_seconds()
        except (KeyError, ValueError, TypeError):
            return None

    @property
    def values(self) -> dict[str, Any]:
        """Everything that a script may read, by name; numbers only of a finished run."""
        facts = {
            "status": self.status, "arm": self.arm or None, "seed": self.spec.config.seed if self.spec else None,
            "step": self.step, "steps": self.steps, "tokens": self.record.get("tokens"), "when": self.when,
            "seconds": self.seconds, "size": size(self.path), "folder": str(self.path),
            "name": self.path.absolute().parent.name, "error": self.error or None,
        }  # fmt: skip
        if self.spec is None:
            return facts
        return {**facts, **self.numbers, **self.spec.choices, **flatten(self.spec.written), **facts}  # these win

    @property
    def numbers(self) -> dict[str, float | None]:
        """What was measured of a finished run, and by its analyses, by name."""
        if self.status != "finished":
            return {}
        numbers = {**self.record["metrics"], "tokens_per_second": self.record["tokens_per_second"]}
        try:
            analyses = read_analyses(self.path / "analysis")
        except UserError:  # the table of its sweep says which is broken
            return numbers
        return numbers | {f"{name}.{key}": n for name, done in analyses.items() for key, n in done["metrics"].items()}


def runs_below(folders: Iterable[Path]) -> list[Listed]:
    """Return what lies in runs, sweeps and folders of sweeps, each once, by path.

    Raises:
        UserError: there is no such folder.
    """
    found: dict[Path, Listed] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}")
        for path in _candidates(folder, DEEPEST):
            found.setdefault(path.absolute(), look(path))
    return sorted(_labelled(found.values()), key=lambda listed: listed.path)


def look(path: Path) -> Listed:
    """Return what a folder is; no file in it is an error."""
    try:
        has_config, has_record = ((path / name).exists() for name in (CONFIG_FILE, RECORD_FILE))
    except OSError as error:  # of somebody else, who lets nobody in
        return Listed(path, "foreign", f"it cannot be read: {error.strerror}")
    broken = "damaged" if has_record else "foreign"
    if not has_config:
        return Listed(path, broken, f"it has {'a record.json but ' * has_record}no config.yaml")
    try:
        spec = RunFolder(path).read_spec()
    except UserError as error:
        return Listed(path, broken, str(error))
    return _ended(Listed(path, "unfinished", spec=spec, said=read_progress(path)), spec.hash)


def _ended(begun: Listed, config_hash: str) -> Listed:
    """Return a run that has begun with how it ended, if it has."""
    folder = RunFolder(begun.path)
    try:
        record = folder.read_record()
    except DamagedRecordError as error:
        return replace(begun, status="damaged", error=f"record.json: {error.reason}")
    except UserError as error:
        return replace(begun, status="damaged", error=str(error))
    if record is not None and record["config_hash"] != config_hash:
        return replace(begun, status="damaged", error="record.json was written for another config than config.yaml")
    if (record is None or record["status"] == "killed") and folder.looks_busy():
        return replace(begun, status="running")
    return begun if record is None else replace(begun, status=record["status"], error=error_of(record), record=record)


def size(path: Path) -> int:
    """Return the bytes that a folder takes on the disk; what a link leads to is not counted, and no file twice."""
    counted: dict[tuple[int, int], int] = {}
    for parent, folders, files in os.walk(path):
        for name in [*folders, *files]:
            try:
                about = os.lstat(Path(parent, name))
            except OSError:  # removed meanwhile
                continue
            counted[about.st_dev, about.st_ino] = about.st_blocks * 512
    return sum(counted.values())


def _candidates(folder: Path, levels: int) -> Iterator[Path]:
    """Yield the runs at most `levels` below a folder, and what lies among them, or among sweeps, without being one."""
    if is_run(folder):
        yield folder
        return
    children = _children(folder)
    kinds = ["run" if _has_run(child) else "sweep" if levels > 1 and _is_sweep(child) else "" for child in children]
    if not any(kinds) and not _is_sweep(folder):
        return
    for child, kind in zip(children, kinds, strict=True):
        if kind == "sweep":
            yield from _candidates(child, levels - 1)
        elif kind or not (child.name in OURS or _has_models(child)):
            yield child


def _has_run(folder: Path) -> bool:
    try:
        return is_run(folder)
    except OSError:
        return False


def _has_models(folder: Path) -> bool:
    """Whether a folder is of a model of Hugging Face that was measured, or holds such folders."""
    try:
        return is_host(folder) or any(map(is_host, _children(folder)))
    except OSError:
        return False


def _is_sweep(folder: Path) -> bool:
    try:
        return any((folder / name).exists() for name in OF_SWEEPS) or any(map(_has_run, _children(folder)))
    except OSError:
        return False


def _children(folder: Path) -> list[Path]:
    """Return the folders in a folder that are not hidden; none if it cannot be read."""
    try:
        return sorted(child for child in folder.iterdir() if not child.name.startswith(".") and child.is_dir())
    except OSError:
        return []


def _labelled(listed: Iterable[Listed]) -> Iterator[Listed]:
    """Yield the same with arms, labelled by what tells apart the runs of one sweep."""
    sweeps: dict[Path, list[Listed]] = defaultdict(list)
    for one in listed:
        sweeps[one.path.absolute().parent].append(one)
    for runs in sweeps.values():
        columns = label_columns([one.spec for one in runs if one.spec])
        for one in runs:
            yield replace(one, arm=short_label(label_of(one.spec, columns))) if one.spec else one


def _changed(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except OSError:
        return None
