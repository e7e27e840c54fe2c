"""Watches the curves of running trials, and stops those that a pruner gives up on.

The sweep's own process reads what the jobs write into their folders; a job needs no access to the study, and any
launcher will do.
"""

import json
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import optuna

from simbal.run_folder import PRUNE_FILE, write_json
from simbal.search.storage import StudyStorage
from simbal.sweep.job import Job

POLL_SECONDS = 0.2


@dataclass
class Candidate:
    """A trial and its jobs, the first of which reports for all."""

    trial: optuna.Trial
    jobs: list[Job]
    reported: set[int] = field(default_factory=set)  # steps
    decision: str = ""  # why it is pruned
    read: tuple[int, int] = (0, 0)  # size and time of metrics.jsonl when it was last read

    def look(self, objective: str) -> None:
        """Report what is new, and ask whether to go on."""
        for step, value in self._new_values(objective):
            self.reported.add(step)
            self.trial.report(value, step)
            if self.trial.should_prune():
                self.decision = f"pruned by trial {self.trial.number}: {objective} was {value:.6g} at step {step}"
                return

    def stop(self) -> None:
        """Tell every job that has not heard of it; one that starts later takes an older word for a stale one."""
        for job in self.jobs:
            path = job.spec.path
            if path.is_dir() and not (path / PRUNE_FILE).exists() and not (path / "record.json").exists():
                write_json(path / PRUNE_FILE, {"reason": self.decision})

    def _new_values(self, objective: str) -> Iterator[tuple[int, float]]:
        file = self.jobs[0].spec.path / "metrics.jsonl"
        try:
            stat = file.stat()
            now = (stat.st_size, stat.st_mtime_ns)
            if now == self.read:
                return
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        except OSError:
            return
        self.read = now
        for line in lines:
            row = json.loads(line) if line.endswith("}\n") else {}
            value = row.get(objective)
            if value is not None and row["step"] > 0 and row["step"] not in self.reported and math.isfinite(value):
                yield row["step"], value


def _look(candidate: Candidate, objective: str) -> None:
    if not candidate.decision:
        candidate.look(objective)
    if candidate.decision:
        candidate.stop()


@contextmanager
def watch(candidates: Sequence[Candidate], objective: str, storage: StudyStorage) -> Iterator[None]:
    """Look at the candidates from a thread of its own while the launcher runs their jobs.

    What goes wrong there is raised at the end: the jobs themselves are none the worse for it.
    """
    over = threading.Event()
    errors: list[Exception] = []

    def poll() -> None:
        try:
            while not over.wait(POLL_SECONDS):
                for candidate in candidates:
                    with storage.errors():
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
