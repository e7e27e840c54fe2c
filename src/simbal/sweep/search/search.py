"""Searches a space: asks a study for trials, launches their jobs, and stores the results in the study.

Meanwhile the sweep's process reads the curves of the jobs, and stops those that the pruner gives up: a job needs no
access to the study, and any launcher will do.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import optuna
from hydra.plugins.launcher import Launcher
from optuna.trial import TrialState
from rich.console import Console

from simbal.config.schema import Config
from simbal.errors import UserError
from simbal.runs.atomic import write_json
from simbal.runs.curves import rows
from simbal.runs.folder import PRUNE_FILE, RECORD_FILE, RunFolder
from simbal.runs.record import error_of, is_number
from simbal.runs.spec import RunSpec
from simbal.sweep.composer import Job
from simbal.sweep.search.optuna_study import ERROR, REPLICATES, RUNS, OptunaStudy
from simbal.sweep.search.settings import SearchSettings

POLL_SECONDS = 0.5


@dataclass
class Candidate:
    """A trial and its jobs, the first of which reports for all."""

    trial: optuna.Trial
    jobs: list[Job]
    step: int = 0  # the last that was reported
    decision: str = ""  # why it is pruned

    def look(self, objective: str) -> None:
        """Report new values to Optuna; if its pruner decides so, stop all jobs."""
        for row in rows(self.jobs[0].spec.path, skip_damaged=True):
            if not self.decision and row["step"] > self.step and is_number(row.get(objective)):
                self.step, value = row["step"], row[objective]
                self.trial.report(value, self.step)
                if self.trial.should_prune():
                    number = self.trial.number
                    self.decision = f"pruned by trial {number}: {objective} was {value:.6g} at step {self.step}"
        for path in (job.spec.path for job in self.jobs) if self.decision else ():
            # a job that starts later removes the file, and gets a new one
            if path.is_dir() and not (path / PRUNE_FILE).exists() and not (path / RECORD_FILE).exists():
                write_json(path / PRUNE_FILE, {"reason": self.decision})


class Search:
    """The search of one arm: its study, the name of its storage, and the jobs of its trials."""

    def __init__(
        self, study: OptunaStudy, storage: str, compose: Callable[[list[str]], Job], launcher: Launcher
    ) -> None:
        self.study, self.storage, self.compose, self.launcher = study, storage, compose, launcher
        self.settings, self.space = study.settings, study.space
        self.ended = self.failures = 0  # trials of this command
        self.first_jobs: list[Job] = []  # the jobs of one point

    def check(self) -> list[Job]:
        """Return jobs with every choice and every end of an interval, or every point of a grid.

        Raises:
            UserError: a job cannot be run, or its folder belongs to another config.
        """
        points = self.space.grid() if self.study.is_grid else self.space.probes()
        jobs = [job for point in points for job in self.jobs(point)]
        for job in jobs:
            RunFolder(job.spec.path).belongs_to(job.spec)
        self.first_jobs = jobs[: len(self.space.replicates)]
        return jobs

    def state(self) -> str:
        """Return the sentence `study coefficient in sqlite:///FILE: 3 of 20 trials done, 17 to run`."""
        done, missing = self.study.done(), self.study.missing()
        state = f"study {self.study.name} in {self.storage}: {done} of {self.study.n_trials} trials done"
        return state + (f", {missing} to run" if missing else "")

    def at_once(self) -> int:
        """Return the number of trials in a batch: `n_jobs`, or as many as keep the launcher busy."""
        if self.settings.n_jobs is not None:
            return self.settings.n_jobs
        slots = getattr(self.launcher, "slots", None)
        return math.ceil((len(slots(self.first_jobs)) if slots else 2) / len(self.space.replicates))

    def run(self, after_batch: Callable[[], None], out: Console) -> None:
        """Run what is missing, batch by batch; `UserError` if too much fails."""
        at_once = self.at_once()
        while candidates := self._ask(min(at_once, self.study.missing())):
            for candidate in candidates:
                params = format_params(candidate.trial.params)
                out.print(f"trial {candidate.trial.number}: {params}", soft_wrap=True)
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
        jobs = [job for candidate in candidates for job in candidate.jobs]
        first = self.ended * len(self.space.replicates)
        if self.settings.pruner == "none":
            self.launcher.launch(jobs, initial_job_idx=first)
        else:
            with watch(candidates, self.settings.objectives[0]):
                self.launcher.launch(jobs, initial_job_idx=first)

    def _store_result(self, candidate: Candidate) -> None:
        trial, study = candidate.trial, self.study.inner
        self.ended += 1
        rows: list[list[float]] = []
        for job, replicate in zip(candidate.jobs, self.space.replicates, strict=True):
            status, row, error = read_result(job.spec, self.settings.objectives)
            if status == "pruned":
                trial.set_user_attr(ERROR, candidate.decision or "pruned")
                study.tell(trial, state=TrialState.PRUNED)
                return
            if error:
                self.failures += 1
                self.study.fail(trial, " ".join([*replicate, error]))
                return
            rows.append(row)
        trial.set_user_attr(REPLICATES, rows)
        study.tell(trial, [fmean(column) for column in zip(*rows, strict=True)])

    def _require_success(self) -> None:
        total, rate = self.study.n_trials, self.settings.max_failure_rate
        if self.study.is_grid or self.failures <= rate * total:
            return
        last = next(trial for trial in reversed(self.study.trials(TrialState.FAIL)) if ERROR in trial.user_attrs)
        raise UserError(
            f"{self.failures} of {self.ended} trials of the study {self.study.name} failed, more than "
            f"hydra.sweeper.max_failure_rate={rate:g} of {total} allows, so the search stops; "
            f"the last: {last.user_attrs[ERROR]}"
        )


def read_result(spec: RunSpec, objectives: Sequence[str]) -> tuple[str, list[float], str]:
    """Return a run's status, its value of each objective, and why it has none."""
    record = RunFolder(spec.path).valid_record()
    if record is None or record["config_hash"] != spec.hash:
        return "", [], f"{spec.path} has no result"
    if record["status"] != "finished":
        return record["status"], [], error_of(record) or record["status"]
    metrics = {**record["metrics"], "tokens_per_second": record["tokens_per_second"]}
    for objective in objectives:
        if metrics.get(objective) is None:
            return "finished", [], f"{spec.path} has measured no {objective}; it has {', '.join(metrics)}"
    return "finished", [float(metrics[objective]) for objective in objectives], ""


@contextmanager
def watch(candidates: Sequence[Candidate], objective: str) -> Iterator[None]:
    """Watch the candidates in a thread within the block; an error in the thread is raised at the end."""
    over = threading.Event()

    def poll() -> None:
        while not over.wait(POLL_SECONDS):
            for candidate in candidates:
                candidate.look(objective)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(poll)
        try:
            yield
        finally:
            over.set()
    for candidate in candidates:
        for job in candidate.jobs:
            (job.spec.path / PRUNE_FILE).unlink(missing_ok=True)
    watching.result()


def format_params(params: dict[str, Any]) -> str:
    """Return parameters as they are given on the command line."""
    return " ".join(f"{key}={value}" for key, value in params.items())


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
