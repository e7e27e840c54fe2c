"""The launcher `hydra/launcher=slurm`: the runs of a sweep as an array of Slurm, whose nodes share a disk."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore

from hydra_plugins.simbal_plugins.launcher import PoolLauncher

if TYPE_CHECKING:
    from simbal.processes import Starter
    from simbal.sweep.composer import Job

FOLDER = ".slurm"  # in output_dir
OF_ALL = ("gpus_per_node", "cpus_per_task", "mem_gb", "timeout_min")  # schedulers in submitit; the others are Slurm's


@dataclass
class SlurmConf:
    """The keys of `hydra.launcher` with `hydra/launcher=slurm`."""

    _target_: str = "hydra_plugins.simbal_plugins.slurm.SlurmLauncher"
    partition: str | None = None  # null: the cluster's default
    account: str | None = None  # that pays; null: the user's default
    gpus_per_node: int = 1  # of each job; 0 for runs on a CPU
    cpus_per_task: int = 8
    mem_gb: float | None = None  # of each job; null: the cluster's default
    timeout_min: int = 240
    max_num_timeout: int = 3  # a run that is out of time is queued again, as often as this, and goes on where it was
    array_parallelism: int = 16  # jobs at once
    threads: int | None = None  # of each job; null: one on a CPU, the libraries' choice with a GPU
    additional_parameters: dict[str, Any] = field(default_factory=dict)  # of sbatch: {constraint: h200}


ConfigStore.instance().store(group="hydra/launcher", name="slurm", node=SlurmConf, provider="simbal")


class SlurmLauncher(PoolLauncher):
    """A launcher that gives all jobs to Slurm at once, and waits."""

    def __init__(self, max_num_timeout: int, threads: int | None, **parameters: Any) -> None:
        self.max_num_timeout, self.threads, self.parameters = max_num_timeout, threads, parameters

    def slots(self, jobs: "Sequence[Job]") -> list[dict[str, str]]:
        """Return the threads of each job: all of them are queued at once."""
        from simbal.processes import remote_slots

        return remote_slots(len(jobs), None, self.threads, self.parameters["gpus_per_node"] > 0)

    def starter(self, jobs: "Sequence[Job]", slot: dict[str, str]) -> "Starter":
        """Return what makes jobs of Slurm; `UserError` where there is none."""
        from pathlib import Path

        from simbal.sweep.slurm_jobs import SlurmStarter

        of_sbatch = {"requeue": True} | dict(self.parameters["additional_parameters"])  # whatever the cluster's default
        given = {key: value for key, value in self.parameters.items() if value} | {"additional_parameters": of_sbatch}
        named = {key if key in OF_ALL else f"slurm_{key}": value for key, value in given.items()}
        config = jobs[0].spec.config
        folder = Path(config.output_dir, FOLDER).absolute()
        return SlurmStarter(folder, named | {"name": config.name}, self.max_num_timeout)
