"""The launcher `hydra/launcher=procs`: a process per job, as many at once as there are cores, or GPUs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hydra.core.config_store import ConfigStore

from hydra_plugins.simbal_plugins.launcher import PoolLauncher

if TYPE_CHECKING:
    from simbal.processes import Starter
    from simbal.sweep.composer import Job

IMPORTED_BY_A_RUN = ("simbal.training.run", "torch.utils.tensorboard", "s3fs")
"""What a run imports, the last two by Lightning while it logs; what is not installed is passed over."""


@dataclass
class ProcsConf:
    """The keys of `hydra.launcher` with `hydra/launcher=procs`."""

    _target_: str = "hydra_plugins.simbal_plugins.procs.ProcsLauncher"
    n_jobs: int | None = None  # jobs at once; null: one per core, or per GPU
    threads: int | None = None  # of each job; null: one on a CPU, the libraries' choice with a GPU
    gpus: list[str] | None = None  # [0,1]: one per job; [0+1,2+3]: two per job; null: every visible GPU
    # modules imported once for all jobs, which are then forked, on CPUs alone; null: every job imports for itself
    preload: list[str] | None = field(default_factory=lambda: [*IMPORTED_BY_A_RUN])


ConfigStore.instance().store(group="hydra/launcher", name="procs", node=ProcsConf, provider="simbal")


class ProcsLauncher(PoolLauncher):
    """A launcher of processes on this machine."""

    here = True

    def __init__(
        self, n_jobs: int | None, threads: int | None, gpus: list[str] | None, preload: list[str] | None
    ) -> None:
        self.n_jobs, self.threads, self.gpus, self.preload = n_jobs, threads, gpus and [*gpus], preload

    def slots(self, jobs: "Sequence[Job]") -> list[dict[str, str]]:
        """Return the threads and GPUs of each job that may run at once; `UserError` for a GPU that is missing."""
        from simbal.processes import cpu_slots, gpu_slots, usable_cores, visible_gpus

        on_cpu = all(job.spec.config.trainer.accelerator == "cpu" for job in jobs)
        visible = [] if on_cpu else visible_gpus(os.environ)
        if visible or self.gpus:
            return gpu_slots(visible, self.gpus, self.n_jobs, self.threads)
        return cpu_slots(usable_cores(), self.n_jobs, self.threads)

    def starter(self, jobs: "Sequence[Job]", slot: dict[str, str]) -> "Starter":
        """Return what starts processes: forks on CPUs, new Pythons with GPUs."""
        from simbal.processes import VISIBLE, ForkServer, Spawn
        from simbal.sweep import worker

        if self.preload is None or VISIBLE in slot:  # a library may look for GPUs while it is imported
            return Spawn(worker)
        return ForkServer(worker.work_on, self.preload, slot)
