"""`hydra/launcher=procs`: a process per job, as many at once as there are cores, or GPUs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from simbal.sweep.attempt import Attempt
    from simbal.sweep.job import Job
    from simbal.sweep.process import Starter


@dataclass
class ProcsConf:
    """Keys of hydra.launcher."""

    _target_: str = "hydra_plugins.simbal_plugins.procs.ProcsLauncher"
    n_jobs: int | None = None  # jobs at once; null: one per core, or per GPU
    threads: int | None = None  # of each job; null: one on a CPU, the libraries' choice with a GPU
    gpus: list[str] | None = None  # [0,1]: one per job; [0+1,2+3]: two per job; null: every visible GPU
    # modules imported once for all jobs, which are then forked, on CPUs alone; null: every job imports for itself
    preload: list[str] | None = field(default_factory=lambda: ["simbal.training.run"])


ConfigStore.instance().store(group="hydra/launcher", name="procs", node=ProcsConf, provider="simbal")


class ProcsLauncher(Launcher):
    """Judges a job by its record alone; one that crashes, or is killed, does not touch the others."""

    def __init__(
        self, n_jobs: int | None, threads: int | None, gpus: list[str] | None, preload: list[str] | None
    ) -> None:
        self.n_jobs, self.threads, self.gpus, self.preload = n_jobs, threads, gpus and [*gpus], preload

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what composes a job; the task function runs in the jobs' own processes."""
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Compose every job, then run those that are not finished.

        Raises:
            UserError: before any job starts.
        """
        from simbal.console import console
        from simbal.sweep.job import Job
        from simbal.sweep.job_return import job_returns
        from simbal.sweep.launch import launch
        from simbal.sweep.pool import Pool
        from simbal.sweep.view import View

        jobs = [Job.compose(o, self.hydra_context.config_loader, self.config) for o in job_overrides]
        slots, out = self.slots(jobs), console()

        def pool(waiting: "Sequence[Attempt]") -> Pool:
            return Pool(slots, self._starter(slots[0]), self._command, View(waiting, len(slots), out))

        return job_returns(launch(jobs, pool, out))

    def slots(self, jobs: "Sequence[Job]") -> list[dict[str, str]]:
        """The environment of each job that may run at once; `UserError` for a GPU that there is not."""
        from simbal.sweep.slots import cpu_slots, gpu_slots, usable_cores, visible_gpus

        on_cpu = all(job.spec.config["trainer"]["accelerator"] == "cpu" for job in jobs)
        visible = [] if on_cpu else visible_gpus(os.environ)
        if visible or self.gpus:
            return gpu_slots(visible, self.gpus, self.n_jobs, self.threads)
        return cpu_slots(usable_cores(), self.n_jobs, self.threads)

    def _starter(self, slot: dict[str, str]) -> "Starter":
        from simbal.sweep.process import Afresh, ForkServer
        from simbal.sweep.slots import VISIBLE

        if self.preload is None or VISIBLE in slot:  # a library may look for GPUs while it is imported
            return Afresh()
        return ForkServer(self.preload, slot)

    def _command(self, job: "Job") -> list[str]:
        """This program again, with the same config folders, for one job."""
        from simbal.sweep.process import program

        hydra = self.config.hydra
        folders = {source.provider: source.path for source in hydra.runtime.config_sources}
        flags = ["--config-name", hydra.job.config_name, "--config-path", folders["main"]]
        if "command-line" in folders:
            flags += ["--config-dir", folders["command-line"]]
        own = ("hydra.mode=", "hydra.sweeper.")  # the sweep's own; a study's storage may hold a password
        forwarded = [line for line in hydra.overrides.hydra if not line.lstrip("+").startswith(own)]
        return [*program(), *flags, *job, *forwarded, "hydra.mode=RUN"]
