"""The launcher `hydra/launcher=ray`: the runs of a sweep on the nodes of a Ray cluster, which share a disk."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hydra.core.config_store import ConfigStore

from hydra_plugins.simbal_plugins.launcher import PoolLauncher

if TYPE_CHECKING:
    from simbal.processes import Starter
    from simbal.sweep.composer import Job
    from simbal.sweep.ray_tasks import Request


@dataclass
class RayConf:
    """The keys of `hydra.launcher` with `hydra/launcher=ray`."""

    _target_: str = "hydra_plugins.simbal_plugins.ray.RayLauncher"
    address: str | None = None  # host:port of the cluster; auto: the one of this machine; null: this machine alone
    n_jobs: int | None = None  # jobs at once; null: as many as the nodes can do when the sweep starts
    num_cpus: float | None = None  # of a node, for a job; null: trainer.devices
    num_gpus: float | None = None  # the same; null: trainer.devices with trainer.accelerator=cuda, else 0
    threads: int | None = None  # of each job; null: one on a CPU, the libraries' choice with a GPU
    max_retries: int = 3  # of a job whose node is taken away; it goes on from its checkpoint


ConfigStore.instance().store(group="hydra/launcher", name="ray", node=RayConf, provider="simbal")


class RayLauncher(PoolLauncher):
    """A launcher that asks Ray for a node with room for each job."""

    def __init__(
        self,
        address: str | None,
        n_jobs: int | None,
        num_cpus: float | None,
        num_gpus: float | None,
        threads: int | None,
        max_retries: int,
    ) -> None:
        self.address, self.n_jobs, self.threads, self.max_retries = address, n_jobs, threads, max_retries
        self.num_cpus, self.num_gpus = num_cpus, num_gpus

    def slots(self, jobs: "Sequence[Job]") -> list[dict[str, str]]:
        """Return the threads of each job that may run at once; `UserError` if no node has room for one."""
        from simbal.processes import remote_slots
        from simbal.sweep.ray_tasks import connect, jobs_at_once

        connect(self.address)
        request = self._request(jobs)
        return remote_slots(jobs_at_once(request), self.n_jobs, self.threads, request.num_gpus > 0)

    def starter(self, jobs: "Sequence[Job]", slot: dict[str, str]) -> "Starter":
        """Return what makes tasks of Ray."""
        from simbal.sweep.ray_tasks import RayStarter

        return RayStarter(self._request(jobs))

    def _request(self, jobs: "Sequence[Job]") -> "Request":
        from simbal.sweep.ray_tasks import Request

        devices = max(job.spec.config.trainer.devices for job in jobs)
        on_gpus = any(job.spec.config.trainer.accelerator == "cuda" for job in jobs)
        cpus = devices if self.num_cpus is None else self.num_cpus
        gpus = devices * on_gpus if self.num_gpus is None else self.num_gpus
        return Request(cpus, gpus, self.max_retries)
