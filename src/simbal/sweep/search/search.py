"""Searches a space: asks a study for trials, has the launcher run their jobs, and stores the results in the study.

Meanwhile the sweep's process reads what the jobs write into their folders, and stops those that a pruner gives up
on: a job needs no access to the study, and any launcher will do.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from hydra.plugins.launcher import Launcher
from optuna.trial import TrialState
from rich.console import Console

from simbal.config.schema import Config
from simbal.errors import UserError
from simbal.files.disk import write_json
from simbal.metrics.definitions import SIMILARITY
from simbal.runs.folder import CURVES_FILE, PRUNE_FILE, RunFolder
from simbal.sweep.composer import Job
from simbal.sweep.search.optuna_study import ERROR, REPLICATES, RETRY_OF, RUNS, OptunaStudy, shown
from simbal.sweep.search.results import curve, means, result, status
from simbal.sweep.search.settings import SearchSettings

POLL_SECONDS = 0.2
ENOUGH = 4  # trials that may all fail before the search is given up, whatever max_failure_rate says


@dataclass
class Candidate:
    """A trial and its jobs, the first of which reports for all."""

    trial: optuna.Trial
    jobs: list[Job]
    reported: set[int] = field(default_factory=set)  # steps
    decision: str = ""  # why it is pruned
    read: tuple[int, int] = (0, 0)  # size and time of metrics.jsonl when it was last read

    def look(self, objective: str) -> None:
        """Report new values to Optuna; once its pruner decides so, ask the jobs to stop, and keep why in `decision`."""
        for step, value in self._new_values(objective) if not self.decision else ():
            self.reported.add(step)
            self.trial.report(value, step)
            if self.trial.should_prune():
                self.decision = f"pruned by trial {self.trial.number}: {objective} was {value:.6g} at step {step}"
                break
        if self.decision:
            self._stop()

    def _stop(self) -> None:
        """Write prune.json for every job that has neither one nor a record.

        A job that starts later removes an older one, and gets a new one.
        """
        for path in (job.spec.path for job in self.jobs):
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


class Search:
    """The search of one arm: its study, the name of its storage, and the jobs of its trials."""

    def __init__(
        self, study: OptunaStudy, storage: str, compose: Callable[[list[str]], Job], launcher: Launcher
    ) -> None:
        self.study, self.storage, self.compose, self.launcher = study, storage, compose, launcher
        self.settings, self.space = study.settings, study.space
        self.ended = self.failures = 0  # trials of this command
        self.first_jobs: list[Job] = []  # the jobs of one point: for its folder, and for what all jobs share

    def check(self) -> list[Job]:
        """Return jobs that show every choice and every end of an interval, or every point of a grid.

        Raises:
            UserError: for one that cannot be run, or whose folder belongs to another config.
        """
        checked: list[Job] = []
        points = self.space.grid() if self.settings.sampler == "grid" else self.space.probes()
        for point in points:
            jobs = self.jobs(point)
            for job in jobs:
                RunFolder(job.spec.path).belongs_to(job.spec)
            self.first_jobs = self.first_jobs or jobs
            checked += jobs
        for objective in self.settings.objectives:
            measured = objective not in {metric.key for metric in SIMILARITY}
            if not measured and not self.first_jobs[0].spec.config.trainer.pes_every:
                raise UserError(f"{objective} is only measured with trainer.pes_every=STEPS")
        return checked

    def progress(self, done: int) -> str:
        """Return the sentence `study coefficient in outputs/coefficient/study.db: 3 of 20 trials done`."""
        return f"study {self.study.name} in {self.storage}: {done} of {self.study.n_trials} trials done"

    def state(self) -> str:
        """Return `progress` with the number of trials left to run."""
        missing = self.study.missing()
        return self.progress(self.study.done()) + (f", {missing} to run" if missing else "")

    def at_once(self) -> int:
        """Return the number of trials in a batch: `n_jobs`, or if that is null as many as keep the launcher busy.

        A launcher that does not say how many jobs it runs at once counts for 2.
        """
        if self.settings.n_jobs is not None:
            return self.settings.n_jobs
        slots = getattr(self.launcher, "slots", None)
        return math.ceil((len(slots(self.first_jobs)) if slots else 2) / len(self.space.replicates))

    def run(self, after_batch: Callable[[], None], out: Console) -> None:
        """Run what is missing, batch by batch.

        Raises:
            UserError: a point cannot be run, or too much fails.
        """
        at_once = self.at_once()
        while True:
            candidates = self._ask(min(at_once, self.study.missing()))
            if not candidates:
                return
            for candidate in candidates:
                out.print(f"trial {candidate.trial.number}: {shown(candidate.trial.params)}", soft_wrap=True)
            self._launch(candidates)
            for candidate in candidates:
                self._store_result(candidate)
            after_batch()
            self._require_success()

    def jobs(self, params: dict[str, Any]) -> list[Job]:
        """Return the jobs of a trial with these parameters; `UserError` if one cannot be run."""
        return [self.compose(lines) for lines in self.space.jobs(params)]

    def _ask(self, count: int) -> list[Candidate]:
        candidates = []
        for _ in range(count):
            trial = self.study.ask()
            if trial is None:
                break
            try:
                jobs = self.jobs(trial.params)
            except UserError as error:
                self.study.fail(trial, str(error))
                raise
            trial.set_user_attr(RUNS, [str(job.spec.path) for job in jobs])
            candidates.append(Candidate(trial, jobs))
        return candidates

    def _launch(self, candidates: Sequence[Candidate]) -> None:
        """Run the jobs of all candidates but those that were pruned just before the last sweep was stopped."""
        waiting = [candidate for candidate in candidates if not self._was_pruned(candidate)]
        jobs = [job for candidate in waiting for job in candidate.jobs]
        if jobs:
            pruning = self.settings.pruner != "none"
            watching = watch(waiting, self.settings.objectives[0]) if pruning else nullcontext()
            with watching:
                self.launcher.launch(jobs, initial_job_idx=self.ended * len(self.space.replicates))

    def _was_pruned(self, candidate: Candidate) -> bool:
        again = self.settings.pruner != "none" and RETRY_OF in candidate.trial.user_attrs
        return again and any(status(job.spec) == "pruned" for job in candidate.jobs)

    def _store_result(self, candidate: Candidate) -> None:
        trial, jobs = candidate.trial, candidate.jobs
        self.ended += 1
        ended = result(jobs, self.space.replicates, self.settings.objectives)
        if ended.state == TrialState.PRUNED:
            trial.set_user_attr(ERROR, candidate.decision or "pruned")
            self.study.inner.tell(trial, state=TrialState.PRUNED)
        elif ended.state == TrialState.FAIL:
            self.failures += 1
            self.study.fail(trial, ended.error)
        else:
            trial.set_user_attr(REPLICATES, ended.rows)
            self.study.inner.tell(trial, means(ended.rows))

    def _require_success(self) -> None:
        if not self.failures:
            return
        last = next(trial for trial in reversed(self.study.trials(TrialState.FAIL)) if ERROR in trial.user_attrs)
        said = f"{self.failures} of {self.ended} trials of the study {self.study.name} failed"
        why = f"; the last: {last.user_attrs[ERROR]}"
        if self.failures == self.ended >= min(ENOUGH, self.study.n_trials):
            raise UserError(f"{said}, so the search stops{why}")
        if self.settings.sampler != "grid" and self.failures > self.settings.max_failure_rate * self.study.n_trials:
            rate = f"hydra.sweeper.max_failure_rate={self.settings.max_failure_rate:g}"
            raise UserError(f"{said}, more than {rate} of {self.study.n_trials} allows, so the search stops{why}")


@contextmanager
def watch(candidates: Sequence[Candidate], objective: str) -> Iterator[None]:
    """Watch the candidates in a thread within the block, while the launcher runs their jobs.

    An error in the thread is raised at the end: the jobs themselves are none the worse for it.
    """
    over = threading.Event()
    errors: list[Exception] = []

    def poll() -> None:
        try:
            while not over.wait(POLL_SECONDS):
                for candidate in candidates:
                    candidate.look(objective)
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


def make_pruner(settings: SearchSettings, config: Config) -> optuna.pruners.BasePruner:
    """Return the pruner that `hydra.sweeper.pruner` names, for runs with this config."""
    first, last = config.trainer.val_every, config.trainer.max_steps
    if settings.pruner == "median":
        # the dense validations of the first steps say little of the last
        return optuna.pruners.MedianPruner(settings.pruner_startup_trials, n_warmup_steps=min(first, last))
    if settings.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner(min_resource=min(first, last), max_resource=last)
    if settings.pruner == "successive_halving":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=min(first, last))
    return optuna.pruners.NopPruner()
