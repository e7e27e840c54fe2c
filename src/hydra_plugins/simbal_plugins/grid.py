"""`hydra/sweeper=grid`: every combination of the values given, then the table of what came of them."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from simbal.errors import UserError, exit_on_user_error


@dataclass
class GridConf:
    """Keys of hydra.sweeper."""

    _target_: str = "hydra_plugins.simbal_plugins.grid.GridSweeper"
    params: dict[str, Any] = field(default_factory=dict)  # as on the command line: `seed: 0-4`


ConfigStore.instance().store(group="hydra/sweeper", name="grid", node=GridConf, provider="simbal")


class GridSweeper(Sweeper):
    """Checks every job before the first starts; the command line wins over `params`."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the launcher."""
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Run the grid and print its table; exit code 1 if a job failed or was asked for what cannot be."""
        from simbal.config import integer_keys
        from simbal.sweep import spans
        from simbal.sweep.job import Job
        from simbal.sweep.report import report

        assert self.hydra_context and self.config and self.launcher  # noqa: PT018
        loader = self.hydra_context.config_loader
        with exit_on_user_error():
            lines = [f"{key}={value}" for key, value in self.params.items()] + arguments
            grid = combinations(spans.parse(lines, integer_keys(), OverridesParser.create(loader)))
            jobs = [Job.compose(overrides, loader, self.config) for overrides in grid]
            returns = self.launcher.launch(jobs, initial_job_idx=0)
            for folder, baseline in {job.spec.path.parent: job.spec.config["baseline"] for job in jobs}.items():
                report(folder, baseline)
        failed = sum(job_return.status == JobStatus.FAILED for job_return in returns)
        if failed:
            raise SystemExit(f"{failed} of {len(returns)} jobs failed")
        return returns


def combinations(overrides: Sequence[Override]) -> Iterator[list[str]]:
    """One list of `key=value` lines per job; of two overrides of a key the later one counts."""
    values = {}
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            line = key if override.value_type is None else f"{key}={override.get_value_element_as_str()}"
            values[key] = [line]
        elif override.is_discrete_sweep():
            values[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            raise UserError(f"{override.input_line}: a grid takes values one by one, not an interval")
    return map(list, itertools.product(*values.values()))
