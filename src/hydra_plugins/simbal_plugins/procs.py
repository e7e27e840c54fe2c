"""`hydra/launcher=procs`: a fresh process per job, as many at once as there are cores, or GPUs."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from simbal.sweep.job import Job


@dataclass
class ProcsConf:
    """Keys of hydra.launcher."""

    _target_: str = "hydra_plugins.simbal_plugins.procs.ProcsLauncher"
    n_jobs: int | None = None  # jobs at once; null: one per core, or per GPU
    threads: int | None = None  # of each job; null: one on a CPU, the libraries' choice with a GPU
    gpus: list[str] | None = None  # [0,1]: one per job; [0+1,2+3]: two per job; null: every visible GPU


ConfigStore.instance().store(group="hydra/launcher", name="procs", node=ProcsConf, provider="simbal")


class ProcsLauncher(Launcher):
    """Judges a job by its record alone; one that crashes, or is killed, does not touch the others."""

    def __init__(self, n_jobs: int | None, threads: int | None, gpus: list[str] | None) -> None:
        self.n_jobs, self.threads, self.gpus = n_jobs, threads, gpus and [*gpus]

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
        from simbal.sweep.launch import launch

        jobs = [Job.compose(o, self.hydra_context.config_loader, self.config) for o in job_overrides]
        attempts = launch(jobs, self._slots(jobs), self._command, console())
        returns = []
        for attempt in attempts:
            job_return = JobReturn(overrides=[*attempt.job], working_dir=str(attempt.job.spec.path))
            job_return.status = JobStatus.FAILED if attempt.state == "failed" else JobStatus.COMPLETED
            job_return.return_value = RuntimeError(attempt.error) if attempt.state == "failed" else None
            returns.append(job_return)
        return returns

    def _slots(self, jobs: "Sequence[Job]") -> list[dict[str, str]]:
        from simbal.sweep.slots import cpu_slots, gpu_slots, usable_cores, visible_gpus

        on_cpu = all(job.spec.config["trainer"]["accelerator"] == "cpu" for job in jobs)
        visible = [] if on_cpu else visible_gpus(os.environ)
        if visible or self.gpus:
            return gpu_slots(visible, self.gpus, self.n_jobs, self.threads)
        return cpu_slots(usable_cores(), self.n_jobs, self.threads)

    def _command(self, job: "Job") -> list[str]:
        """This program again, with the same config folders, for one job."""
        main = getattr(sys.modules["__main__"], "__spec__", None)
        program = ["-m", main.name] if main else [str(Path(sys.argv[0]).absolute())]
        hydra = self.config.hydra
        folders = {source.provider: source.path for source in hydra.runtime.config_sources}
        flags = ["--config-name", hydra.job.config_name, "--config-path", folders["main"]]
        if "command-line" in folders:
            flags += ["--config-dir", folders["command-line"]]
        forwarded = [line for line in hydra.overrides.hydra if not line.lstrip("+").startswith("hydra.mode=")]
        return [sys.executable, *program, *flags, *job, *forwarded, "hydra.mode=RUN"]
