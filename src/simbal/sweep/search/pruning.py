"""Prunes running trials: watches their curves, and stops those that a pruner gives up on.

The sweep's own process reads what the jobs write into their folders; a job needs no access to the study, and any
launcher will do.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import optuna

from simbal.files.disk import write_json
from simbal.metrics.aliases import current
from simbal.runs.curves import readable_rows
from simbal.runs.folder import CURVES_FILE, PRUNE_FILE
from simbal.runs.record import is_number
from simbal.sweep.composer import Job
from simbal.sweep.search.storage import StudyStorage

POLL_SECONDS = 0.2
LAST_STEP = 2**31 - 1  # the last step that a database can hold


@dataclass
class Candidate:
    """A trial and its jobs, the first of which reports for all."""

    trial: optuna.Trial
    jobs: list[Job]
    reported: set[int] = field(default_factory=set)  # steps
    decision: str = ""  # why it is pruned
    read: tuple[int, int] = (0, 0)  # size and time of metrics.jsonl when it was last read

    def look(self, objective: str) -> None:
        """Report new values to Optuna, and note in `decision` if the trial is to be pruned."""
        for step, value in self._new_values(objective):
            self.reported.add(step)
            self.trial.report(value, step)
            if self.trial.should_prune():
                self.decision = f"pruned by trial {self.trial.number}: {objective} was {value:.6g} at step {step}"
                return

    def stop(self) -> None:
        """Write prune.json for every job that has neither one nor a record.

        A job that starts later removes an older one, and gets a new one.
        """
        for job in self.jobs:
            path = job.spec.path
            if path.is_dir() and not (path / PRUNE_FILE).exists() and not (path / "record.json").exists():
                write_json(path / PRUNE_FILE, {"reason": self.decision})

    def _new_values(self, objective: str) -> Iterator[tuple[int, float]]:
        run = self.jobs[0].spec.path
        try:
            stat = (run / CURVES_FILE).stat()
        except OSError:  # not there yet
            return
        now = (stat.st_size, stat.st_mtime_ns)
        if now != self.read:
            self.read = now
            yield from ((step, value) for step, value in curve(run, objective).items() if step not in self.reported)


@contextmanager
def watch(candidates: Sequence[Candidate], objective: str, storage: StudyStorage) -> Iterator[None]:
    """Watch the candidates in a thread within the block, while the launcher runs their jobs.

    An error in the thread is raised at the end: the jobs themselves are none the worse for it.
    """
    over = threading.Event()
    errors: list[Exception] = []

    def poll() -> None:
        try:
            while not over.wait(POLL_SECONDS):
                for candidate in candidates:
                    with storage.translate_errors():
                        _look(candidate, objective)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=poll, name="prune-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for candidate in candidates:
            for job in candidate.jobs:
                Path(job.spec.path, PRUNE_FILE).unlink(missing_ok=True)
    if errors:
        raise errors[0]


def curve(run: Path, metric: str) -> dict[int, float]:
    """Return finite values of a metric by step, from the first step on.

    Lines that say nothing of the metric are left out, and so are those that cannot be read: the last may be half
    written, and whether the others are what the run has written is said by the checksum of its record.

    Raises:
        UserError: the file is none that a run writes: a pipe, a device, or larger than any.
    """
    key = current(metric)
    found = [row for row in readable_rows(run) if is_number(row.get(key)) and 0 < row["step"] <= LAST_STEP]
    return {row["step"]: float(row[key]) for row in found}


def _look(candidate: Candidate, objective: str) -> None:
    if not candidate.decision:
        candidate.look(objective)
    if candidate.decision:
        candidate.stop()
