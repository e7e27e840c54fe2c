"""Plan a sweep: find the runs that are finished, failed, interrupted or new, and launch what is missing."""

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from simbal.commands import original_command
from simbal.errors import BusyError, UserError
from simbal.report.arms import with_folders
from simbal.runs.atomic import explain_write_errors, write_json
from simbal.runs.folder import RECORD_FILE, DamagedRecordError, RunFolder
from simbal.runs.record import PROGRESS_FILE, error_of
from simbal.runs.spec import SWEEP_FILE
from simbal.sweeping.composer import Job
from simbal.sweeping.outcome import Outcome, recorded_outcome

Kind = Literal["finished", "failed", "resumed", "new"]
State = Literal["queued", "running", "locked", "done", "pruned", "failed"]
KINDS: tuple[Kind, ...] = ("finished", "failed", "resumed", "new")


@dataclass
class Attempt:
    """A run of the sweep: the content of its folder when the sweep started, and its state since then.

    The state is `locked` while another process writes the run.
    """

    job: Job
    label: str
    state: State = "queued"
    error: str = ""  # why the run failed
    record: dict[str, Any] | None = None  # as read when the sweep started
    started: float | None = None  # seconds of the monotonic clock
    ended: float | None = None
    total: float | None = None  # seconds of a resumed run that has finished, in all its attempts
    kind: Kind = "new"
    note: str = ""  # a sentence to print before the sweep starts
    tokens: str = ""  # fingerprint of the data of a finished run
    folder: RunFolder = field(init=False)

    def __post_init__(self) -> None:
        self.folder = RunFolder(self.job.spec.path)

    @property
    def seconds(self) -> float:
        """The running time so far; of a resumed run that has finished, the time of all attempts."""
        if self.total is not None:
            return self.total
        return 0.0 if self.started is None else (self.ended or time.monotonic()) - self.started

    def prepare_folder(self) -> Outcome | None:
        """Write the config of the run, and remove the leftovers of an interrupted attempt.

        Returns:
            None if a job may start. Otherwise the outcome: another process is writing the run or has finished it in the
            meantime, the folder belongs to another config, or the disk rejects writes.
        """
        folder, spec = self.folder, self.job.spec
        try:
            with folder.lock():
                folder.belongs_to(spec)
                folder.set_aside_damaged_record()
                record = folder.read_record()
                if record is not None and record["status"] != "killed" and record != self.record:
                    return recorded_outcome(folder, spec)
                for stale in (RECORD_FILE, PROGRESS_FILE):
                    (folder.path / stale).unlink(missing_ok=True)
                folder.write_spec(spec)
                return None
        except BusyError as error:
            return "locked", str(error)
        except UserError as error:
            return "failed", str(error)


def plan(jobs: Sequence[Job], retry_failed: bool) -> list[Attempt]:
    """Return one attempt for each run, in order.

    Raises:
        UserError: a folder belongs to another config or cannot be read.
    """
    return [_inspect(job, label, retry_failed) for job, label in zip(jobs, labels(jobs), strict=True)]


def launch(jobs: Sequence[Job], run_attempts: Callable[[Sequence[Attempt]], None], console: Console) -> list[Attempt]:
    """Run all jobs that are not finished, and return one attempt for each job.

    Args:
        jobs: composed and checked jobs.
        run_attempts: runs the queued attempts. It is not called if there are none.
        console: where to print the number of finished, failed, resumed and new runs.
    """
    unique = {job.spec.path: job for job in jobs}  # trials of a search may sample the same values
    attempts = plan([*unique.values()], jobs[0].spec.config.retry_failed)
    queued = [attempt for attempt in attempts if attempt.state == "queued"]
    for attempt in attempts:
        if attempt.note:
            console.print(attempt.note, soft_wrap=True)
    console.print(summary(attempts))
    if queued:
        run_attempts(queued)
    by_path = dict(zip(unique, attempts, strict=True))
    return [by_path[job.spec.path] for job in jobs]


def assign_folders(jobs: Sequence[Job], columns: Sequence[str] = ()) -> Sequence[Job]:
    """Give each job its run folder, and return the jobs; see `with_folders`."""
    for job, spec in zip(jobs, with_folders([job.spec for job in jobs], columns), strict=True):
        job.spec = spec
    return jobs


def labels(jobs: Sequence[Job]) -> list[str]:
    """Return the overrides of each job that not all jobs share, or the name of its folder if none is left."""
    common = set(jobs[0]).intersection(*jobs)
    varied = (" ".join(line.lstrip("+") for line in job if line not in common) for job in jobs)
    return [label or job.spec.path.name for label, job in zip(varied, jobs, strict=True)]


def summary(attempts: Sequence[Attempt]) -> str:
    """Return the counts: `2 finished, 1 failed before (retry_failed=true tries again), 0 resumed, 3 new`."""
    counts = {kind: sum(attempt.kind == kind for attempt in attempts) for kind in KINDS}
    parts = {kind: f"{count} {kind}" for kind, count in counts.items() if count or kind != "failed"}
    if counts["failed"]:
        parts["failed"] += " before (retry_failed=true tries again)"
    return ", ".join(parts.values())


def write_sweep_json(folder: Path, jobs: Sequence[Job] = ()) -> None:
    """Write the command and the planned runs to sweep.json, so that a table can list runs that never started."""
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    runs = {job.spec.path.name: label for job, label in zip(jobs, labels(jobs), strict=True)} if jobs else {}
    write_json(folder / SWEEP_FILE, {"command": shlex.join(original_command()), "runs": runs})


def _inspect(job: Job, label: str, retry_failed: bool) -> Attempt:
    folder, spec = RunFolder(job.spec.path), job.spec
    if not folder.belongs_to(spec):
        return Attempt(job, label)
    try:
        record = folder.read_record()
    except DamagedRecordError as error:
        note = f"{folder.path / 'record.json'} is damaged ({error.reason}): the run is repeated"
        return Attempt(job, label, kind="resumed", note=note)
    if record is not None and record["status"] == "finished" and record["config_hash"] == spec.hash:
        return Attempt(job, label, "done", kind="finished", tokens=record["data"]["tokens"])
    if record is not None and record["status"] in ("failed", "diverged") and not retry_failed:
        return Attempt(job, label, "failed", error_of(record), kind="failed")
    return Attempt(job, label, kind="resumed", record=record)
