"""Adapts other launchers (joblib, submitit, Ray, and whatever else Hydra knows) to do what ours does."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pkgutil import resolve_name
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from simbal.errors import redacted
from simbal.files.console import console
from simbal.processes.slots import THREADS, visible_gpus
from simbal.sweep.attempt import Attempt
from simbal.sweep.composer import Composer, Job
from simbal.sweep.ending import ELSEWHERE, Outcome, oom_kills, record_exit, recorded_outcome
from simbal.sweep.pool import POLL_SECONDS, sigterm_raises
from simbal.sweep.resume import launch
from simbal.sweep.worker import Assignment, Task

OURS = "hydra_plugins.simbal_plugins."
# by the launcher's package: the object and the method that ask for a result, and what stands for none
RESULTS: dict[str, tuple[str, str, Any]] = {
    "hydra_plugins.hydra_submitit_launcher": ("submitit.core.core:Job", "results", [None]),
    "hydra_plugins.hydra_ray_launcher": ("ray", "get", None),
}
NO_RECORD = "left no record: killed, or never started; the same command goes on with it"


def make_launcher(hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> Launcher:
    """Return the launcher that the config of a sweep names: `procs` as it is, any other in an `OtherLauncher`."""
    if config.hydra.launcher._target_.startswith(OURS):
        return Plugins.instance().instantiate_launcher(hydra_context, task_function, config)
    launcher = OtherLauncher()
    launcher.setup(hydra_context=hydra_context, task_function=task_function, config=config)
    return launcher


def job_returns(attempts: Iterable[Attempt]) -> list[JobReturn]:
    """Return how attempts ended in Hydra's terms.

    The value is None, as all that counts stands in the run's folder, or an error.
    """
    returns = []
    for attempt in attempts:
        failed = attempt.state == "failed"
        job_return = JobReturn(overrides=[*attempt.job], working_dir=str(attempt.job.spec.path))
        job_return.status = JobStatus.FAILED if failed else JobStatus.COMPLETED
        job_return.return_value = RuntimeError(attempt.error) if failed else None
        returns.append(job_return)
    return returns


class OtherLauncher(Launcher):
    """A launcher around another, which gives it only what is left to run, and reads outcomes from the runs' folders.

    Ray and submitit raise an error for a job that was killed, in place of what all the others return; joblib, too, and
    starts no further job.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the launcher that `config`, that of the sweep, names."""
        self.name = str(config.hydra.runtime.choices["hydra/launcher"])
        self.loader, self.config = hydra_context.config_loader, config
        self.first_job, self.out, self.task = 0, console(), Task()
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=self.task, config=config
        )

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose every job, then run those that are not finished.

        Raises:
            UserError: before any job starts.
        """
        self.first_job = initial_job_idx
        jobs = [*map(Composer(self.loader, self.config).job, job_overrides)]
        return job_returns(launch(jobs, lambda waiting: self, self.out))

    def run(self, attempts: Sequence[Attempt]) -> None:
        """Have the launcher run the attempts, also those that another process leaves unfinished."""
        with sigterm_raises():
            while waiting := [attempt for attempt in attempts if attempt.state in ("queued", "elsewhere")]:
                if claimed := [attempt for attempt in waiting if self._claim(attempt)]:
                    self._delegate(claimed)
                else:
                    time.sleep(POLL_SECONDS)

    def _claim(self, attempt: Attempt) -> bool:
        if (outcome := attempt.claim()) is None:
            return True
        self._note(attempt, outcome)
        if attempt.state == "failed":
            self.out.print(f"failed {attempt.label}: {attempt.error}", soft_wrap=True)
        return False

    def _delegate(self, attempts: Sequence[Attempt]) -> None:
        """Have the launcher run attempts, and note how each ended.

        The records say so, whatever the launcher returns or raises, or other processes hold the runs.
        """
        _limit_threads(attempt.job for attempt in attempts)
        self.out.print(f"given to hydra/launcher={self.name}: {len(attempts)}", soft_wrap=True)
        self.task.first_job = self.first_job
        self.task.assignments = [Assignment.of(attempt.job.spec, None) for attempt in attempts]
        starts, kills = [attempt.console_size() for attempt in attempts], oom_kills()
        returns: Sequence[Any] = []
        with waiting_for_all(self.launcher) as errors:
            try:
                returns = self.launcher.launch([[] for _ in attempts], self.first_job)  # their configs are written
            except Exception as error:
                errors.append(error)
        for raised in errors:
            said = redacted(str(raised).strip().partition("\n")[0])
            self.out.print(f"hydra/launcher={self.name}: {type(raised).__name__}: {said}", soft_wrap=True)
        for attempt, returned, start in zip_longest(attempts, returns, starts):
            self._note(attempt, self._outcome(attempt, returned, start, kills))

    def _outcome(self, attempt: Attempt, returned: Any, console_start: int, oom_kills_before: int) -> Outcome:
        folder, spec = attempt.folder, attempt.job.spec
        if isinstance(returned, JobReturn) and returned.status == JobStatus.COMPLETED:
            return record_exit(folder, spec, returned.return_value, console_start, oom_kills_before)
        return recorded_outcome(folder, spec) or (ELSEWHERE if folder.busy() else ("failed", NO_RECORD))

    def _note(self, attempt: Attempt, outcome: Outcome) -> None:
        """Set an attempt's state, and print that it is elsewhere when it first is."""
        before, (attempt.state, attempt.error) = attempt.state, outcome
        if attempt.state == "elsewhere" != before:
            self.out.print(f"elsewhere {attempt.label}: {attempt.error}", soft_wrap=True)


@contextmanager
def waiting_for_all(launcher: object) -> Iterator[list[Exception]]:
    """Make the launchers of submitit and Ray wait for all results; yield a list that fills with what the jobs raise.

    They ask for the results one by one. A job that was killed has none: it raises, and those behind it are no longer
    waited for; Ray's then die with the sweep.
    """
    errors: list[Exception] = []
    package = ".".join(type(launcher).__module__.split(".")[:2])
    if package not in RESULTS:
        yield errors
        return
    path, name, nothing = RESULTS[package]
    owner = resolve_name(path)
    ask = getattr(owner, name)

    def result(*args: Any, **kwargs: Any) -> Any:
        try:
            return ask(*args, **kwargs)
        except Exception as error:
            errors.append(error)
            return nothing

    setattr(owner, name, result)
    try:
        yield errors
    finally:
        setattr(owner, name, ask)


def _limit_threads(jobs: Iterable[Job]) -> None:
    """Set one thread for a job on a CPU, as `procs` has it, unless the user has set others; jobs inherit it."""
    accelerators = {job.spec.config.trainer.accelerator for job in jobs}
    if accelerators == {"cpu"} or (accelerators <= {"cpu", "auto"} and not visible_gpus(os.environ)):
        for name in THREADS:
            os.environ.setdefault(name, "1")
