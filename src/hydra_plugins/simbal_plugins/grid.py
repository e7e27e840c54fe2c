"""The sweeper `hydra/sweeper=grid`: run every combination of the given values, then print the table of results."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, product
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from simbal.config import spans
from simbal.config.options import split_arm
from simbal.config.schema import integer_keys
from simbal.errors import ConfigError, UserError
from simbal.sweeping.composer import Composer, Job


@dataclass
class GridConf:
    """The keys of `hydra.sweeper` with `hydra/sweeper=grid`."""

    _target_: str = "hydra_plugins.simbal_plugins.grid.GridSweeper"
    params: dict[str, Any] = field(default_factory=dict)  # values by key, such as `seed: 0-4`
    arms: list[str] = field(default_factory=list)  # lines of overrides, such as `balancing=none model.num_experts=0`


ConfigStore.instance().store(group="hydra/sweeper", name="grid", node=GridConf, provider="simbal")


class ArmSweeper(Sweeper):
    """A sweeper with `params` and `arms`. Overrides on the command line replace both."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Create the composer and the launcher."""
        self.config, self.loader = config, hydra_context.config_loader
        self.composer = Composer(self.loader, config)
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def parse(self, lines: list[str]) -> list[Override]:
        """Parse lines such as `seed=0-4`, and expand their spans.

        Raises:
            ConfigError: a span is invalid.
            OverrideParseException: a line is not in Hydra's grammar.
        """
        return [*map(_restore, spans.parse(lines, integer_keys(), OverridesParser.create(self.loader)))]

    def print_replaced(self, arms: list[str], arguments: list[str]) -> None:
        """Print the overrides of the arms that the command line replaces."""
        from simbal.console import console

        given = {override.key_or_group: override for override in self.parse(arguments)}
        replaced: dict[str, dict[str, None]] = {}
        for override in (override for arm in arms for override in self.parse(split_arm(arm))):
            argument = given.get(override.key_or_group)
            if argument and argument.value() != override.value():
                replaced.setdefault(str(argument.input_line), {})[str(override.input_line)] = None
        for line, lines in replaced.items():
            console().print(f"{line} replaces {', '.join(lines)} of the sweep's arms", soft_wrap=True)


class GridSweeper(ArmSweeper):
    """A sweeper that checks all combinations before the first one starts."""

    def __init__(self, params: dict[str, Any], arms: list[str]) -> None:
        self.params, self.arms = params, arms

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Run the grid and print its table; exit with code 1 if a job fails or cannot start."""
        from simbal.sweeping import checks
        from simbal.sweeping.looks import check_decidable

        assert self.config
        jobs = self._compose(arguments)
        self.print_replaced(self.arms, arguments)
        checks.check_one_table(jobs)
        checks.check_columns(jobs)
        overridden = [override.key_or_group for override in self.parse(arguments)]
        if "baseline" in overridden:
            checks.check_baseline(jobs)
        if any(key.startswith("balancing.") for key in overridden):
            checks.check_strategies(jobs)
        if self.config.until == "decided":
            check_decidable(jobs, self.config.max_seeds)
        if self.config.dry_run:
            self._print_forecast(jobs)
            return []
        try:
            if self.config.until == "decided":
                jobs, returns = self._run_until_decided(arguments, jobs)
            else:
                returns = [*self._launch(jobs, jobs)]
        except KeyboardInterrupt:
            with_results = {folder for folder in {job.spec.parent for job in jobs} if checks.finished_runs(folder)}
            _report([job for job in jobs if job.spec.parent in with_results])
            raise
        _report(jobs)
        failed = sum(job_return.status == JobStatus.FAILED for job_return in returns)
        if failed:
            raise SystemExit(f"{failed} of {len(returns)} jobs failed")
        return returns

    def _compose(self, arguments: list[str]) -> list[Job]:
        """Compose and check the jobs, one per distinct run; `ConfigError` if one is invalid."""
        from simbal.sweeping.plan import assign_folders

        params = {key: f"{key}={value}" for key, value in self.params.items()}
        lines = list[list[str]]()
        for arm in map(split_arm, self.arms or [""]):
            own = {override.key_or_group for override in self.parse(arm)}
            others = [param for key, param in params.items() if key not in own]
            lines += combinations(self.parse([*arm, *others, *arguments]))
        required = {override.key_or_group for override in self.parse([*params.values(), *arguments])}
        jobs = [*map(self.composer.job, self.composer.drop_inapplicable(lines, required))]
        return [*{job.spec.path: job for job in assign_folders(jobs)}.values()]

    def _launch(self, jobs: list[Job], all_jobs: list[Job]) -> Sequence[JobReturn]:
        """Run jobs and return how they ended. `all_jobs` also includes the jobs of earlier looks."""
        from simbal.sweeping.checks import prepare_launch
        from simbal.sweeping.plan import assign_folders, write_sweep_json

        assert self.launcher
        prepare_launch(jobs, self.launcher)
        assign_folders(jobs)  # again, because another sweep may have planned the same runs during the preparation
        for folder in {job.spec.path.parent for job in all_jobs}:
            write_sweep_json(folder, [job for job in all_jobs if job.spec.path.parent == folder])
        return self.launcher.launch(jobs, initial_job_idx=len(all_jobs) - len(jobs))

    def _run_until_decided(self, arguments: list[str], jobs: list[Job]) -> tuple[list[Job], list[JobReturn]]:
        """Run the jobs, then add the same number of seeds at a time until all arms are decided.

        Returns:
            All jobs, and how they ended.
        """
        from simbal.console import console
        from simbal.sweeping.looks import decide_arms, format_look, seeds_of_looks

        assert self.config
        max_seeds = self.config.max_seeds
        seeds = seeds_of_looks(sorted({job.spec.config.seed for job in jobs}), max_seeds)
        looks = [*accumulate(map(len, seeds))]
        all_jobs: list[Job] = []
        returns: list[JobReturn] = []
        for num_seeds, new_seeds in zip(looks, seeds, strict=True):
            jobs = self._compose([*arguments, f"seed={','.join(map(str, new_seeds))}"])
            all_jobs += jobs
            returns += self._launch(jobs, all_jobs)
            decisions = decide_arms(all_jobs, looks, max_seeds)
            console().print(format_look(decisions, num_seeds, max_seeds))
            if all(decisions.values()):
                break
        return all_jobs, returns

    def _print_forecast(self, jobs: list[Job]) -> None:
        from simbal.console import console
        from simbal.sweeping.checks import check_all_buildable
        from simbal.sweeping.plan import plan, summary
        from simbal.sweeping.view import forecast

        assert self.config
        assert self.launcher
        check_all_buildable(jobs, self.launcher)
        planned = plan(jobs, self.config.retry_failed)
        slots = getattr(self.launcher, "slots", None)  # launchers of other packages have no slots
        table, sentence = forecast(planned, len(slots(jobs)) if slots else 1)
        console().print(table, summary(planned), sentence, sep="\n")


def _report(jobs: Sequence[Job]) -> None:
    """Print the table of each folder of the jobs, and write its files."""
    from simbal.report.report import report

    for folder, config in {job.spec.parent: job.spec.config for job in jobs}.items():
        keys = {"baseline": config.baseline, "columns": config.columns}
        report(folder, **keys, equivalence_margin=config.equivalence_margin, save=True)


def combinations(overrides: Sequence[Override]) -> Iterator[list[str]]:
    """Yield the `key=value` lines of each job. A later override of a key replaces earlier ones."""
    values = {}
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            values[key] = [key if override.value_type is None else f"{key}={override.get_value_element_as_str()}"]
        elif override.is_discrete_sweep():
            values[key] = [f"{key}={value}" for value in islice(override.sweep_string_iterator(), spans.MAX_VALUES + 1)]
            if len(values[key]) > spans.MAX_VALUES:
                raise ConfigError(f"{override.input_line} has more than {spans.MAX_VALUES} values")
        else:
            raise UserError(f"{override.input_line}: a grid needs a list of values, not an interval")
    return map(list, product(*values.values()))


def _restore(override: Override) -> Override:
    """Return `key=choice(value)`, with which the command line defers a value to the sweeper, as `key=value`."""
    value = override.value()
    if isinstance(value, ChoiceSweep) and len(value.list) == 1 and not value.shuffle:
        return spans.read(f"{override.get_key_element()}={next(override.sweep_string_iterator())}")
    return override
