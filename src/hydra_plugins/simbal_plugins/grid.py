"""The sweeper `hydra/sweeper=grid`: runs every combination of the values given, then prints the table of results."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus

from hydra_plugins.simbal_plugins.sweeper import LaunchingSweeper
from simbal.errors import UserError, exit_on_user_error

if TYPE_CHECKING:
    from simbal.sweep.composer import Job


@dataclass
class GridConf:
    """The keys of `hydra.sweeper` with `hydra/sweeper=grid`."""

    _target_: str = "hydra_plugins.simbal_plugins.grid.GridSweeper"
    params: dict[str, Any] = field(default_factory=dict)  # as on the command line: `seed: 0-4`
    arms: list[str] = field(default_factory=list)  # overrides that go together: `balancing=none model.num_experts=0`


ConfigStore.instance().store(group="hydra/sweeper", name="grid", node=GridConf, provider="simbal")


class GridSweeper(LaunchingSweeper):
    """A sweeper over a grid, which checks every job first; the command line wins over `params` and `arms`."""

    def __init__(self, params: dict[str, Any], arms: list[str]) -> None:
        self.params, self.arms = params, arms

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Run the grid and print its table; exit code 1 if a job failed or was asked for what cannot be."""
        from simbal.report.report import report
        from simbal.sweep.looks import require_decidable

        assert self.config and self.launcher  # noqa: PT018
        with exit_on_user_error():
            jobs = self._jobs(arguments)
            self._say_what_is_replaced(arguments, jobs)
            self._check_table(arguments, jobs)
            if self.config.until == "decided":
                require_decidable(jobs)
            if self.config.dry_run:
                self._show_forecast(jobs)
                return []
            if self.config.until == "decided":
                jobs, returns = self._until_decided(arguments, jobs)
            else:
                returns = self._launch(jobs, jobs, 0)
            for folder, config in {job.spec.path.parent: job.spec.config for job in jobs}.items():
                report(folder, config.baseline, config.columns, False, config.equivalence_margin)
        failed = sum(job_return.status == JobStatus.FAILED for job_return in returns)
        if failed:
            raise SystemExit(f"{failed} of {len(returns)} jobs failed")
        return returns

    def _jobs(self, arguments: list[str]) -> "list[Job]":
        """Return every run once, composed and checked; `UserError` for one that cannot be."""
        from simbal.config.options import split_arm

        params = [f"{key}={value}" for key, value in self.params.items()]
        arms = [[*split_arm(arm), *params, *arguments] for arm in self.arms or [""]]
        lines = [job for arm in arms for job in combinations(self.overrides(arm))]
        given = {override.key_or_group for override in self.overrides([*params, *arguments])}
        unique: dict[Path, Job] = {}
        for job in map(self.composer.job, self.composer.own_keys(lines, given)):
            unique.setdefault(job.spec.path, job)
        return [*unique.values()]

    def _say_what_is_replaced(self, arguments: list[str], jobs: "list[Job]") -> None:
        from simbal.console import console

        several = "" if len(self.arms) < 2 else f": {len(jobs)} different runs are left"
        for said in self.replaced(self.arms, arguments):
            console().print(f"{said}{several}", markup=False, highlight=False, soft_wrap=True)

    def _check_table(self, arguments: list[str], jobs: "list[Job]") -> None:
        """Raise `UserError` for what would spoil the table once all is trained.

        A sweep that is narrowed on the command line may lose the arm that its file names as the baseline: that is said.
        """
        from simbal.console import console
        from simbal.sweep.one_table import check_columns, no_such_baseline, require_one_table

        require_one_table(jobs)
        check_columns(jobs)
        typed = any(override.key_or_group == "baseline" for override in self.overrides(arguments))
        for baseline in dict.fromkeys(job.spec.config.baseline for job in jobs):
            said = no_such_baseline(jobs, baseline) if typed or "=" in baseline else None
            if said and typed:
                raise UserError(said)
            if said:
                said += ": the table will show no difference"
                console().print(said, markup=False, highlight=False, soft_wrap=True)

    def _launch(self, jobs: "list[Job]", ran: "list[Job]", first: int) -> Sequence[JobReturn]:
        """Run jobs, the newest of all that were run, and return how they ended."""
        from simbal.sweep.resume import require_launch, write_sweep

        assert self.launcher
        require_launch(jobs, self.launcher)
        write_sweep(ran)
        return self.launcher.launch(jobs, initial_job_idx=first)

    def _until_decided(self, arguments: list[str], jobs: "list[Job]") -> "tuple[list[Job], Sequence[JobReturn]]":
        """Run the jobs, and then as many further seeds at a time as these have, until a look decides every arm.

        Returns:
            All jobs that were run, and how they ended.
        """
        from simbal.console import console
        from simbal.sweep.looks import look, seeds_of_looks, sentence

        assert self.config
        most = self.config.max_seeds
        seeds = seeds_of_looks(sorted({job.spec.config.seed for job in jobs}), most)
        looks = [*accumulate(map(len, seeds))]
        ran: list[Job] = []
        returns: list[JobReturn] = []
        for pairs, further in zip(looks, seeds, strict=True):
            jobs = self._jobs([*arguments, f"seed={','.join(map(str, further))}"])
            ran += jobs
            returns += self._launch(jobs, ran, len(returns))
            decisions = look(ran, looks, most)
            console().print(sentence(decisions, pairs, most), highlight=False)
            if all(decisions.values()):
                break
        return ran, returns

    def _show_forecast(self, jobs: "list[Job]") -> None:
        from simbal.console import console
        from simbal.sweep.resume import plan, require_buildable, summary
        from simbal.sweep.view import forecast

        assert self.config and self.launcher  # noqa: PT018
        require_buildable(jobs, self.launcher)
        planned = plan(jobs, self.config.retry_failed)
        slots = getattr(self.launcher, "slots", None)  # other launchers do not say
        table, sentence = forecast(planned, len(slots(jobs)) if slots else 1)
        console().print(table, summary(planned), sentence, sep="\n", highlight=False)


def combinations(overrides: Sequence[Override]) -> Iterator[list[str]]:
    """Yield one list of `key=value` lines per job; of two overrides of a key the later one counts."""
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
    return map(list, product(*values.values()))
