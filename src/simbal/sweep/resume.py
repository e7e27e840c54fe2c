"""Resumes a sweep: finds which of its runs are finished, have failed, have begun or are new, and launches the rest."""

import json
import shlex
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.plugins.launcher import Launcher
from rich.console import Console

from simbal.commands import typed_command
from simbal.files.disk import refusals_of_disk, write_json
from simbal.runs.folder import DamagedRecordError, RunFolder
from simbal.runs.record import error_of
from simbal.sweep.attempt import Attempt, Kind
from simbal.sweep.composer import Job
from simbal.sweep.one_table import require_one_table
from simbal.sweep.pool import Pool

ASKED = ("dry_run=true", "dry_run=True")  # says nothing of a run
KINDS: tuple[Kind, ...] = ("finished", "failed", "resumed", "new")


def plan(jobs: Sequence[Job], retry_failed: bool) -> list[Attempt]:
    """Return one attempt for each run, in order; jobs that compose to the same run share one.

    Raises:
        UserError: a folder belongs to another config, or cannot be read.
    """
    unique: dict[str, tuple[Job, str]] = {}
    for job, label in zip(jobs, labels(jobs), strict=True):
        unique.setdefault(str(job.spec.path), (job, label))
    return [_found(job, label, retry_failed) for job, label in unique.values()]


def launch(jobs: Sequence[Job], runner: Callable[[Sequence[Attempt]], Pool], console: Console) -> list[Attempt]:
    """Run what is left of the jobs, and return one attempt for each, in order; jobs of the same run share one.

    Args:
        jobs: all of them composed and checked.
        runner: makes the runner for the attempts that are left; called if there are any, before the data are prepared.
        console: where the sweep is shown.

    Raises:
        UserError: before any job starts, if the data cannot be prepared, a folder belongs to another config or data, or
            the runs cannot stand in one table.
    """
    attempts = plan(jobs, any(job.spec.config.retry_failed for job in jobs))
    waiting = [attempt for attempt in attempts if attempt.state == "queued"]
    ready = runner(waiting) if waiting else None
    _require_data(jobs, attempts)
    for note in filter(None, (attempt.note for attempt in attempts)):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    console.print(summary(attempts), highlight=False)
    if ready:
        ready.run(waiting)
    by_path = {attempt.folder.path: attempt for attempt in attempts}
    return [by_path[job.spec.path] for job in jobs]


def require_launch(jobs: Sequence[Job], launcher: Launcher) -> None:
    """Prepare the data of jobs, and raise `UserError` for what `launch` would refuse once sweep.json names them."""
    if slots := getattr(launcher, "slots", None):  # other launchers do not say
        slots(jobs)
    _require_data(jobs, plan(jobs, retry_failed=False))


def require_buildable(jobs: Sequence[Job], launcher: Launcher) -> None:
    """Raise `UserError` for what a run would refuse when it starts, such as missing text or an absent backend.

    Jobs that differ in their seed or learning rate alone are built once.
    """
    from simbal.data.store import open_source
    from simbal.training.build import check_buildable  # torch

    for job in {_data(job): job for job in jobs}.values():
        open_source(job.spec.config.data).identity()
    shaping = {"model", "router", "balancing", "experts", "trainer"}
    for job in {job.spec.config.model_dump_json(include=shaping): job for job in jobs}.values():
        check_buildable(job.spec, here=getattr(launcher, "here", True))


def labels(jobs: Sequence[Job]) -> list[str]:
    """Return each job's overrides as text, without those that all have."""
    common = set(jobs[0]).intersection(*jobs) if len(jobs) > 1 else {line for line in jobs[0] if line in ASKED}
    return [" ".join(o for o in job if o not in common) or job.spec.path.name for job in jobs]


def summary(attempts: Sequence[Attempt]) -> str:
    """Return the counts: `2 finished, 1 failed before (retry_failed=true tries again), 0 resumed, 3 new`."""
    counts = {kind: sum(attempt.kind == kind for attempt in attempts) for kind in KINDS}
    said = {kind: f"{count} {kind}" for kind, count in counts.items() if count or kind != "failed"}
    if counts["failed"]:
        said["failed"] += " before (retry_failed=true tries again)"
    return ", ".join(said.values())


def write_sweep(jobs: Sequence[Job]) -> None:
    """Write sweep.json in each of the folders; a table can then name the runs that were never started."""
    folders: dict[Path, dict[str, str]] = defaultdict(dict)
    for job, label in zip(jobs, labels(jobs), strict=True):
        folders[job.spec.path.parent].setdefault(job.spec.path.name, label)
    for folder, runs in folders.items():
        write_sweep_json(folder, runs)


def write_sweep_json(folder: Path, runs: dict[str, str]) -> None:
    """Write sweep.json: the command, and `runs`, labels by folder name.

    A search gives no runs, as it finds out on the way what it will run.
    """
    with refusals_of_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(typed_command())
    write_json(folder / "sweep.json", {"command": command, "runs": runs})


def _found(job: Job, label: str, retry_failed: bool) -> Attempt:
    folder, spec = RunFolder(job.spec.path), job.spec
    if not folder.belongs_to(spec):
        return Attempt(job, label)
    try:
        record = folder.read_record()
    except DamagedRecordError as error:
        file = folder.path / "record.json"
        return Attempt(job, label, kind="resumed", note=f"{file} is damaged ({error.reason}): the run is done again")
    if record is not None and record["status"] == "finished" and record["config_hash"] == spec.hash:
        return Attempt(job, label, "done", kind="finished", tokens=record["data"]["tokens"])
    if record is not None and record["status"] in ("failed", "diverged") and not retry_failed:
        return Attempt(job, label, "failed", error_of(record), kind="failed")
    return Attempt(job, label, kind="resumed", record=record)


def _require_data(jobs: Sequence[Job], attempts: Sequence[Attempt]) -> None:
    """Prepare the data; `UserError` if a run was finished on others, or if the runs cannot stand in one table."""
    tokens = _prepare_data(jobs)
    for attempt in attempts:
        if attempt.kind == "finished":
            attempt.folder.require_same_data(attempt.tokens, tokens[attempt.folder.path])
    require_one_table(jobs, tokens)


def _data(job: Job) -> str:
    """Return the keys that decide a job's corpus, or how it is split, as JSON; the order of batches is none of them."""
    return json.dumps(job.spec.config.data.model_dump(exclude={"seed"}), sort_keys=True)


def _prepare_data(jobs: Sequence[Job]) -> dict[Path, str]:
    """Prepare each corpus once, with its progress bar, rather than in every job at once.

    Returns:
        The fingerprint of the tokens, by the folder of the run.
    """
    from simbal.data.store import prepare

    by_data: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        by_data[_data(job)].append(job)
    tokens: dict[Path, str] = {}
    for alike in by_data.values():
        fingerprint = prepare(alike[0].spec.config.data, progress=True).fingerprints["tokens"]
        tokens |= dict.fromkeys([job.spec.path for job in alike], fingerprint)
    return tokens
