"""What a sweep has to do: which of its runs are finished, and which are to be started, continued or left alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from simbal.record_schema import error_of
from simbal.run_folder import DamagedRecordError
from simbal.sweep.attempt import Attempt
from simbal.sweep.job import Job

Kind = Literal["finished", "failed", "resumed", "new"]
KINDS: tuple[Kind, ...] = ("finished", "failed", "resumed", "new")


@dataclass
class Planned:
    """One run of the sweep; a failed one is left as it is."""

    attempt: Attempt
    kind: Kind
    note: str = ""  # what a person should know of it

    @property
    def to_run(self) -> bool:
        """Whether there is anything left to do."""
        return self.kind in ("resumed", "new")


def plan(jobs: Sequence[Job], retry_failed: bool) -> list[Planned]:
    """One entry for each run, in order; jobs that compose to the same run share one.

    Raises:
        UserError: a folder belongs to another config, or cannot be read.
    """
    unique: dict[str, tuple[Job, str]] = {}
    for job, label in zip(jobs, labels(jobs), strict=True):
        unique.setdefault(str(job.spec.path), (job, label))
    return [_planned(Attempt(job, label), retry_failed) for job, label in unique.values()]


def labels(jobs: Sequence[Job]) -> list[str]:
    """Each job's overrides, less those that all have."""
    common = set(jobs[0]).intersection(*jobs) if len(jobs) > 1 else set()
    return [" ".join(o for o in job if o not in common) or job.spec.path.name for job in jobs]


def summary(planned: Sequence[Planned]) -> str:
    """`2 finished, 1 failed before (retry_failed=true tries again), 0 resumed, 3 new`."""
    counts = {kind: sum(entry.kind == kind for entry in planned) for kind in KINDS}
    said = {kind: f"{count} {kind}" for kind, count in counts.items() if count or kind != "failed"}
    if counts["failed"]:
        said["failed"] += " before (retry_failed=true tries again)"
    return ", ".join(said.values())


def _planned(attempt: Attempt, retry_failed: bool) -> Planned:
    folder, spec = attempt.folder, attempt.job.spec
    if not folder.belongs_to(spec):
        return Planned(attempt, "new")
    if folder.finished(spec):
        attempt.state = "done"
        return Planned(attempt, "finished")
    try:
        record = folder.read_record()
    except DamagedRecordError as error:
        file = folder.path / "record.json"
        return Planned(attempt, "resumed", f"{file} is damaged ({error.reason}): the run is done again")
    if record is not None and record["status"] in ("failed", "diverged") and not retry_failed:
        attempt.state, attempt.error = "failed", error_of(record)
        return Planned(attempt, "failed")
    return Planned(attempt, "resumed")
