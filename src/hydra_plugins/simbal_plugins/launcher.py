"""What the launchers of simbal have in common: a pool that gives jobs to a starter of processes, wherever these run."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from simbal.processes import Starter
    from simbal.sweep.attempt import Attempt
    from simbal.sweep.composer import Job
    from simbal.sweep.pool import Pool


class PoolLauncher(Launcher):
    """A launcher that judges a job by its record alone; a job that crashes or is killed does not touch others."""

    here: ClassVar[bool] = False  # whether jobs run on this machine

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what composes a job; the task function runs in the jobs' own processes."""
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose every job, then run those that are not finished.

        Raises:
            UserError: before any job starts.
        """
        from simbal.console import console
        from simbal.sweep.composer import Composer
        from simbal.sweep.pool import Pool
        from simbal.sweep.resume import launch
        from simbal.sweep.view import View

        jobs = [*map(Composer(self.hydra_context.config_loader, self.config).job, job_overrides)]
        slots, out = self.slots(jobs), console()

        def pool(waiting: "Sequence[Attempt]") -> "Pool":
            return Pool(slots, self.starter(jobs, slots[0]), View(waiting, len(slots), out))

        return _returns(launch(jobs, pool, out))

    @abstractmethod
    def slots(self, jobs: "Sequence[Job]") -> list[dict[str, str]]:
        """Return the environment of each job that may run at once; `UserError` for what is missing."""

    @abstractmethod
    def starter(self, jobs: "Sequence[Job]", slot: dict[str, str]) -> "Starter":
        """Return what starts the jobs' processes, given the environment of one."""


def _returns(attempts: "Iterable[Attempt]") -> list[JobReturn]:
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
