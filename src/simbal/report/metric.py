"""The columns of numbers that a table can have: those of every run, and those of its analyses."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simbal.errors import UserError
from simbal.report.arms import ABSENT
from simbal.report.collect import Run
from simbal.report.statistics import Summary


@dataclass(frozen=True)
class Metric:
    """A column of a table: its key in record.json, its title and how its numbers are written."""

    key: str
    title: str
    number: str
    arrow: str = ""  # the better direction, where that is known
    compared: bool = True  # whether its difference to the baseline is shown

    @property
    def heading(self) -> str:
        """The title, with an arrow to the better direction."""
        return f"{self.title} {self.arrow}".strip()

    def write(self, summary: Summary | None, separator: str = " ") -> str:
        """Return `mean ± sd`, the mean alone for a single seed, a dash for none."""
        if summary is None:
            return ABSENT
        if summary.sd is None:
            return self.number.format(summary.mean)
        return f"{self.number.format(summary.mean)}{separator}± {self.number.format(summary.sd)}"


METRICS = (
    Metric("val/ppl", "perplexity", "{:.3f}", "↓"),
    Metric("val/bpb", "bits/byte", "{:.4f}", "↓"),
    Metric("load/max_vio", "MaxVio", "{:.3f}", "↓"),
    Metric("load/unique_experts", "experts used", "{:.1f}", "↑"),
    Metric("routing/seu", "SEU", "{:.3f}"),
    Metric("routing/entropy", "entropy", "{:.3f}"),
    Metric("pes/min", "min PES", "{:.4f}", "↓"),
    Metric("router/gram_deviation", "(R^T R - I)^2", "{:.2e}", compared=False),
    Metric("tokens_per_second", "tokens/s", "{:,.0f}", "↑", compared=False),
)


def usual(finished: Sequence[Run]) -> list[Metric]:
    """Return the metrics of a table without a choice: those of METRICS that a finished run has a number for."""
    return [metric for metric in METRICS if any(run.value(metric.key) is not None for run in finished)]


def own_columns(finished: Sequence[Run]) -> list[str] | None:
    """Return the runs' own `columns` if all finished runs name the same ones; else None."""
    named = [run.spec.config.columns for run in finished]
    return named[0] if named and all(columns == named[0] for columns in named) else None


def choose(columns: Sequence[str], runs: Sequence[Run]) -> list[Metric]:
    """Return the metrics of these names: `val/ppl`, `redundancy.min_pes`, or the last part alone.

    A name that stands for a number of every run is that one: `ppl` is `val/ppl`, and not `quality.ppl`.

    Raises:
        UserError: a name that no finished run has, or that two analyses have, or analyses with other settings.
    """
    own = {metric.key: metric for metric in METRICS}
    analysed = {key: Metric(key, key, "{:.4g}") for run in runs for key in run.analysed}
    chosen = []
    for column in columns:
        for known in (own, analysed):
            found = [key for key in known if column in (key, re.split(r"[/.]", key)[-1])]
            if found:
                break
        if len(found) != 1:
            what = f"may be {' or '.join(sorted(found))}" if found else "is none of them"
            raise UserError(f"columns: {column} {what}; there is {', '.join([*own, *sorted(analysed)])}")
        chosen.append(known[found[0]])
    refuse_unlike({metric.key.partition(".")[0] for metric in chosen if metric.key in analysed}, runs)
    return chosen


def refuse_unlike(analyses: Iterable[str], runs: Sequence[Run]) -> None:
    """Raise `UserError` if one of the analyses was done with other settings in one run than in another."""
    for analysis in analyses:
        done = [run for run in runs if analysis in run.analyses]
        for run in done[1:]:
            if run.analyses[analysis]["settings"] != done[0].analyses[analysis]["settings"]:
                raise UserError(
                    f"{done[0].path} and {run.path} cannot stand in one table: {analysis} was done with other settings"
                )
