"""Launchers that are not ours, held to what ours does: joblib, submitit, Ray, and whatever else Hydra knows."""

import os
from collections.abc import Iterable, Sequence

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from simbal.console import console
from simbal.errors import UserError
from simbal.run_folder import BusyError
from simbal.sweep.attempt import Attempt
from simbal.sweep.job import Job
from simbal.sweep.job_return import job_returns
from simbal.sweep.launch import launch
from simbal.sweep.outcome import outcome
from simbal.sweep.patience import patient
from simbal.sweep.pool import sigterm_raises
from simbal.sweep.slots import THREADS, visible_gpus
from simbal.sweep.task import Task

OURS = "hydra_plugins.simbal_plugins."
NO_RECORD = "left no record: killed, never started, or still running elsewhere; the same command goes on with it"


def make_launcher(hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> Launcher:
    """The launcher that a sweep's own config names: `procs` as it is, any other in an `OtherLauncher`."""
    if config.hydra.launcher._target_.startswith(OURS):
        return Plugins.instance().instantiate_launcher(hydra_context, task_function, config)
    launcher = OtherLauncher()
    launcher.setup(hydra_context=hydra_context, task_function=task_function, config=config)
    return launcher


class OtherLauncher(Launcher):
    """Gives a launcher only what is left to run, and asks the runs' folders, not the launcher, what came of it.

    Ray and submitit raise an error for a job that was killed, in place of what all the others return; joblib, too, and
    starts no further job.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the launcher that `config`, the sweep's own, names."""
        self.name = str(config.hydra.runtime.choices["hydra/launcher"])
        self.loader, self.config = hydra_context.config_loader, config
        self.first_job, self.out = 0, console()
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=Task(task_function), config=config
        )

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose every job, then run those that are not finished.

        Raises:
            UserError: before any job starts.
        """
        self.first_job = initial_job_idx
        jobs = [Job.compose(overrides, self.loader, self.config) for overrides in job_overrides]
        return job_returns(launch(jobs, lambda waiting: self, self.out))

    def run(self, attempts: Sequence[Attempt]) -> None:
        """Have the launcher run them; whatever it returns or raises, the records say how they ended."""
        ours = [attempt for attempt in attempts if self._claim(attempt)]
        if not ours:
            return
        jobs = [attempt.job for attempt in ours]
        _limit_threads(jobs)
        self.out.print(f"given to hydra/launcher={self.name}: {len(jobs)}", soft_wrap=True)
        with sigterm_raises(), patient(self.launcher) as errors:
            try:
                self.launcher.launch(jobs, self.first_job)
            except Exception as error:
                errors.append(error)
        for raised in errors:
            said = str(raised).strip().partition("\n")[0]
            self.out.print(f"hydra/launcher={self.name}: {type(raised).__name__}: {said}", soft_wrap=True)
        for attempt in ours:
            try:
                attempt.state, attempt.error = outcome(attempt.folder, attempt.job.spec) or ("failed", NO_RECORD)
            except UserError as error:  # its record is broken
                attempt.state, attempt.error = "failed", str(error)

    def _claim(self, attempt: Attempt) -> bool:
        try:
            if attempt.claim():
                return True
            attempt.state = "done"
        except UserError as error:
            attempt.state, attempt.error = "failed", str(error)
            kind = "elsewhere" if isinstance(error, BusyError) else "failed"
            self.out.print(f"{kind} {attempt.label}: {error}", soft_wrap=True)
        return False


def _limit_threads(jobs: Iterable[Job]) -> None:
    """One thread for a job on a CPU, as `procs` has it, unless the user has said otherwise; jobs inherit this."""
    accelerators = {job.spec.config["trainer"]["accelerator"] for job in jobs}
    if accelerators == {"cpu"} or (accelerators <= {"cpu", "auto"} and not visible_gpus(os.environ)):
        for name in THREADS:
            os.environ.setdefault(name, "1")
