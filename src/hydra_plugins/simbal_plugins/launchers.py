"""The launchers `hydra/launcher=procs`, `ray` and `slurm`: run the jobs of a sweep as processes."""

import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from simbal import processes
from simbal.sweeping.composer import Composer, Job

IMPORTED_BY_A_RUN = ("simbal.training.run", "torch.utils.tensorboard", "s3fs")  # Lightning's logger imports two of them
SLURM_FOLDER = ".slurm"  # in output_dir: scripts and logs
COMMON = ("gpus_per_node", "cpus_per_task", "mem_gb", "timeout_min")  # names of submitit; others get the prefix slurm_


class PoolLauncher(Launcher):
    """A launcher that runs each job in its own process and takes the outcome from the record of the run.

    A job that crashes or is killed does not affect other jobs.
    """

    here: ClassVar[bool] = False  # whether the jobs run on this machine

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Store Hydra's context and config, which compose jobs."""
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs that are not finished, and return how each ended."""
        from simbal.console import console
        from simbal.sweeping import plan
        from simbal.sweeping.pool import Pool
        from simbal.sweeping.view import View

        jobs = [*map(Composer(self.hydra_context.config_loader, self.config).job, job_overrides)]
        environments, out = self.slots(jobs), console()

        def run_attempts(attempts: Sequence[plan.Attempt]) -> None:
            starter = self.starter(jobs, environments[0])
            Pool(environments, starter, View(attempts, len(environments), out)).run(attempts)

        returns = []
        for attempt in plan.launch(jobs, run_attempts, out):
            returns.append(JobReturn(overrides=[*attempt.job], working_dir=str(attempt.job.spec.path)))
            returns[-1].status = JobStatus.FAILED if attempt.state == "failed" else JobStatus.COMPLETED
            returns[-1].return_value = RuntimeError(attempt.error) if attempt.state == "failed" else None
        return returns

    @abstractmethod
    def slots(self, jobs: Sequence[Job]) -> list[dict[str, str]]:
        """Return the environment variables of each slot, which runs one job at a time; `UserError` without a device."""

    @abstractmethod
    def starter(self, jobs: Sequence[Job], slot: dict[str, str]) -> processes.Starter:
        """Return the starter of the jobs' processes, given the environment of one slot."""


@dataclass
class ProcsConf:
    """The keys of `hydra.launcher` with `hydra/launcher=procs`."""

    _target_: str = "hydra_plugins.simbal_plugins.launchers.ProcsLauncher"
    n_jobs: int | None = None  # jobs at once; null: one per core or GPU
    threads: int | None = None  # per job; null: one on a CPU, the default of each library on a GPU
    gpus: list[str] | None = None  # [0,1]: one GPU per job; [0+1,2+3]: two per job; null: all visible GPUs
    # modules that a fork server imports once for all jobs on a CPU; null: each job is a new Python
    preload: list[str] | None = field(default_factory=lambda: [*IMPORTED_BY_A_RUN])


class ProcsLauncher(PoolLauncher):
    """Run jobs as processes on this machine."""

    here = True

    def __init__(self, **keys: Any) -> None:
        """Take the keys of `ProcsConf`."""
        self.keys = ProcsConf(**keys)

    def slots(self, jobs: Sequence[Job]) -> list[dict[str, str]]:
        """Return one slot per core or GPU."""
        on_cpu = all(job.spec.config.trainer.accelerator == "cpu" for job in jobs)
        visible = [] if on_cpu else processes.visible_gpus(os.environ)
        if visible or self.keys.gpus:
            return processes.gpu_slots(visible, self.keys.gpus, self.keys.n_jobs, self.keys.threads)
        return processes.cpu_slots(processes.usable_cores(), self.keys.n_jobs, self.keys.threads)

    def starter(self, jobs: Sequence[Job], slot: dict[str, str]) -> processes.Starter:
        """Return a fork server for CPUs. With GPUs each job is a new Python, because imports may initialize a GPU."""
        from simbal.sweeping import worker

        if self.keys.preload is None or processes.VISIBLE in slot:
            return processes.Spawn(worker)
        return processes.ForkServer(worker.work, self.keys.preload, slot)


@dataclass
class RayConf:
    """The keys of `hydra.launcher` with `hydra/launcher=ray`."""

    _target_: str = "hydra_plugins.simbal_plugins.launchers.RayLauncher"
    address: str | None = None  # host:port; auto: a cluster that runs on this machine; null: start one here
    n_jobs: int | None = None  # jobs at once; null: as many as all nodes have room for when the sweep starts
    num_cpus: float | None = None  # per job; null: trainer.devices
    num_gpus: float | None = None  # per job; null: trainer.devices if trainer.accelerator=cuda, else 0
    threads: int | None = None  # per job; null: one on a CPU, the default of each library on a GPU
    max_retries: int = 3  # of a job whose node is lost; each retry resumes from the checkpoint


class RayLauncher(PoolLauncher):
    """Run jobs as tasks of a Ray cluster whose nodes share a disk."""

    def __init__(self, **keys: Any) -> None:
        """Take the keys of `RayConf`."""
        self.keys = RayConf(**keys)

    def slots(self, jobs: Sequence[Job]) -> list[dict[str, str]]:
        """Connect to the cluster, and return one slot per job that its nodes have room for."""
        from simbal.sweeping.ray_tasks import connect, count_slots

        connect(self.keys.address)
        num_cpus, num_gpus = self._resources(jobs)
        max_jobs = count_slots(num_cpus, num_gpus)
        return processes.remote_slots(max_jobs, self.keys.n_jobs, self.keys.threads, on_gpus=num_gpus > 0)

    def starter(self, jobs: Sequence[Job], slot: dict[str, str]) -> processes.Starter:
        """Return the starter that submits tasks to Ray."""
        from simbal.sweeping.ray_tasks import RayStarter

        return RayStarter(*self._resources(jobs), self.keys.max_retries)

    def _resources(self, jobs: Sequence[Job]) -> tuple[float, float]:
        """Return the CPUs and GPUs of a job."""
        devices = max(job.spec.config.trainer.devices for job in jobs)
        on_gpus = any(job.spec.config.trainer.accelerator == "cuda" for job in jobs)
        num_cpus = devices if self.keys.num_cpus is None else self.keys.num_cpus
        num_gpus = devices * on_gpus if self.keys.num_gpus is None else self.keys.num_gpus
        return num_cpus, num_gpus


@dataclass
class SlurmConf:
    """The keys of `hydra.launcher` with `hydra/launcher=slurm`."""

    _target_: str = "hydra_plugins.simbal_plugins.launchers.SlurmLauncher"
    partition: str | None = None  # null: the default of the cluster
    account: str | None = None  # null: the default of the user
    gpus_per_node: int = 1  # per job; 0 to train on a CPU
    cpus_per_task: int = 8
    mem_gb: float | None = None  # per job; null: the default of the cluster
    timeout_min: int = 240
    max_num_timeout: int = 3  # how often a run that timed out is requeued; it resumes from its checkpoint
    array_parallelism: int = 16  # jobs at once
    threads: int | None = None  # per job; null: one on a CPU, the default of each library on a GPU
    additional_parameters: dict[str, Any] = field(default_factory=dict)  # options of sbatch, such as {constraint: h200}


class SlurmLauncher(PoolLauncher):
    """Submit all jobs to Slurm as an array, and wait for them. All nodes share a disk."""

    def __init__(self, max_num_timeout: int, threads: int | None, **parameters: Any) -> None:
        self.max_num_timeout, self.threads, self.parameters = max_num_timeout, threads, parameters

    def slots(self, jobs: Sequence[Job]) -> list[dict[str, str]]:
        """Return one slot per job, because all jobs are queued at once."""
        return processes.remote_slots(len(jobs), None, self.threads, self.parameters["gpus_per_node"] > 0)

    def starter(self, jobs: Sequence[Job], slot: dict[str, str]) -> processes.Starter:
        """Return the starter that submits jobs to Slurm; `UserError` if Slurm is not installed."""
        from simbal.sweeping.slurm_jobs import SlurmStarter

        options = {"requeue": True} | dict(self.parameters["additional_parameters"])  # JobRequeue=0 may be the default
        given = {key: value for key, value in self.parameters.items() if value} | {"additional_parameters": options}
        named = {key if key in COMMON else f"slurm_{key}": value for key, value in given.items()}
        config = jobs[0].spec.config
        folder = Path(config.output_dir, SLURM_FOLDER).absolute()
        return SlurmStarter(folder, named | {"name": config.name}, self.max_num_timeout)


for name, conf in {"procs": ProcsConf, "ray": RayConf, "slurm": SlurmConf}.items():
    ConfigStore.instance().store(group="hydra/launcher", name=name, node=conf, provider="simbal")
