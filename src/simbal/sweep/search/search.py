"""Searches a space: asks a study for trials, has the launcher run their jobs, and tells the study the results."""

import math
from collections.abc import Callable, Sequence, Sized
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import optuna
from optuna.trial import TrialState
from rich.console import Console

from simbal.config.schema import can_change_result
from simbal.errors import UserError, redacted
from simbal.metrics.aliases import current
from simbal.metrics.table import SIMILARITY
from simbal.runs.folder import RunFolder
from simbal.sweep.composer import Job
from simbal.sweep.search.integrity import check_content, check_results
from simbal.sweep.search.objective import means, result, status
from simbal.sweep.search.pruning import Candidate, watch
from simbal.sweep.search.storage import StudyStorage
from simbal.sweep.search.study import ERROR, REPLICATES, RETRY_OF, RUNS, Study, make_pruner, shown

ENOUGH = 4  # trials that may all fail before the search is given up, whatever max_failure_rate says


class Launcher(Protocol):
    """The part of Hydra's launcher interface that a search needs."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[Any]:
        """Run the jobs and wait for them."""


@runtime_checkable
class Slotted(Protocol):
    """A launcher that knows how many jobs it runs at once."""

    def slots(self, jobs: Sequence[Job]) -> Sized:
        """Return one slot for each job that runs at once."""


class Search:
    """A study and its jobs."""

    def __init__(
        self, study: Study, storage: StudyStorage, compose: Callable[[list[str]], Job], launcher: Launcher
    ) -> None:
        self.study, self.storage, self.compose, self.launcher = study, storage, compose, launcher
        self.settings, self.space = study.settings, study.space
        self.ended = self.failures = 0  # trials of this command
        self.first_jobs: list[Job] = []  # the jobs of one point: for its folder, and for what all jobs share
        self.runs_not_here = 0

    def check(self) -> None:
        """Compose jobs that show every choice and every end of an interval, or every point of a grid.

        Raises:
            UserError: for one that cannot be run, or whose folder belongs to another config.
        """
        points = self.space.grid() if self.settings.sampler == "grid" else self.space.probes()
        for point in points:
            jobs = self.jobs(point)
            for job in jobs:
                RunFolder(job.spec.path).belongs_to(job.spec)
            self.first_jobs = self.first_jobs or jobs
        for objective in self.settings.objectives:
            measured = current(objective) not in {metric.key for metric in SIMILARITY}
            if not measured and not self.first_jobs[0].spec.config.trainer.pes_every:
                raise UserError(f"{objective} is only measured with trainer.pes_every=STEPS")

    def open(self, opened: optuna.storages.BaseStorage) -> None:
        """Load or begin the study, and queue again what was broken off.

        Raises:
            UserError: it searches something else.
            DamagedStudyError: it is not what a search has written, or not what the folders of its runs say.
        """
        config = self.first_jobs[0].spec.config
        with self.storage.content(self.study.name):
            self.begin(opened)
            check_content(self.study)
            self.runs_not_here = check_results(self.study)
        with self.storage.translate_errors():
            self.study.prepare(config.retry_failed, make_pruner(self.settings, config))

    def begin(self, opened: optuna.storages.BaseStorage) -> None:
        """Load the study as it is, or begin it."""
        self.study.open(opened, self._fixed())

    def _fixed(self) -> list[str]:
        """Return the overrides of all jobs that change their results, as the study keeps them."""
        return [redacted(line) for line in self.space.fixed if can_change_result(line.lstrip("+~").partition("=")[0])]

    def state(self) -> str:
        """Return the sentence `study coefficient in outputs/coefficient/study.db: 3 of 20 trials done, 17 to run`."""
        study, missing = self.study, self.study.missing()
        said = f"study {study.name} in {self.storage.shown}: {study.done()} of {study.n_trials} trials done"
        said += f", {missing} to run" if missing else ""
        if elsewhere := study.elsewhere():
            hosts = ", ".join(sorted({str(trial.user_attrs.get("host", "unknown")) for trial in elsewhere}))
            said += f", {len(elsewhere)} running on {hosts} (if not any more: hydra.sweeper.take_over=true)"
        if self.runs_not_here:
            said += f"; {self.runs_not_here} folders of its runs are not here, so that their values were not compared"
        return said

    def forecast(self) -> str:
        """Return a sentence on what `run` would do, from a look at the study that changes nothing."""
        study, done = self.study, 0
        if self.storage.exists():
            with self.storage.content(study.name):
                if study.look(self.storage.open(), self._fixed()):
                    check_content(study)
                    check_results(study)
                    done = study.done()
        return f"study {study.name} in {self.storage.shown}: {done} of {study.n_trials} trials done"

    def at_once(self) -> int:
        """Return the number of trials in a batch: `n_jobs`, or if that is null as many as keep the launcher busy.

        A launcher that does not say how many jobs it runs at once counts for 2.
        """
        if self.settings.n_jobs is not None:
            return self.settings.n_jobs
        slots = len(self.launcher.slots(self.first_jobs)) if isinstance(self.launcher, Slotted) else 2
        return math.ceil(slots / len(self.space.replicates))

    def run(self, after_batch: Callable[[], None], out: Console) -> None:
        """Run what is missing, batch by batch.

        Raises:
            UserError: the storage is lost, a point cannot be run, a record lacks the objective, or too much fails.
        """
        at_once = self.at_once()
        while True:
            with self.storage.translate_errors():
                candidates = self._ask(min(at_once, self.study.missing()))
            if not candidates:
                return
            for candidate in candidates:
                out.print(f"trial {candidate.trial.number}: {shown(candidate.trial.params)}", soft_wrap=True)
            self._launch(candidates)
            with self.storage.translate_errors():
                for candidate in candidates:
                    self._tell(candidate)
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
            watching = watch(waiting, self.settings.objectives[0], self.storage) if pruning else nullcontext()
            with watching:
                self.launcher.launch(jobs, initial_job_idx=self.ended * len(self.space.replicates))

    def _was_pruned(self, candidate: Candidate) -> bool:
        again = self.settings.pruner != "none" and RETRY_OF in candidate.trial.user_attrs
        return again and any(status(job) == "pruned" for job in candidate.jobs)

    def _tell(self, candidate: Candidate) -> None:
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
