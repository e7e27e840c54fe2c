"""The columns of numbers that a table can have, of every run and of its analyses, and the cells below them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from simbal.errors import UserError
from simbal.metrics.definitions import NUMBERS, Metric, short_name
from simbal.report.collect import Run

if TYPE_CHECKING:
    from simbal.report.models import MeasuredModel  # which imports this module

ABSENT = "—"
NAMED = {metric.name: metric for metric in NUMBERS}


@dataclass(frozen=True)
class Cell:
    """A cell as plain text; whoever draws it decides where the aside stands."""

    text: str
    value: float | None = None  # the number that the text shows, by which a column is sorted
    aside: str = ""  # less important, beside the text or below it
    href: str = ""  # a link, relative to the folder of the table
    muted: bool = False  # drawn so that it does not catch the eye

    @property
    def line(self) -> str:
        """The whole cell on one line."""
        return f"{self.text} {self.aside}" if self.aside else self.text

    @property
    def lines(self) -> str:
        """The cell on two lines: its aside, or the end of an interval, below."""
        return f"{self.text}\n{self.aside}" if self.aside else self.text.replace(" to ", " to\n")


def number_cell(number: str, value: float | None) -> Cell:
    """Return a number in the format `number`; a dash for None."""
    return Cell(ABSENT if value is None else number.format(value), value)


def interval_cell(number: str, low: float | None, high: float | None) -> Cell:
    """Return `low to high`, sorted by `low`; a dash where there is no interval."""
    if low is None or high is None:
        return Cell(ABSENT)
    return Cell(f"{number.format(low)} to {number.format(high)}", low)


def usual(finished: Sequence[Run]) -> list[Metric]:
    """Return the metrics of a table without a choice, of those that a finished run has a number for."""
    return [metric for metric in NUMBERS if metric.column and _measured(metric.key, finished)]


def named_by_runs(finished: Sequence[Run]) -> list[str] | None:
    """Return the key `columns` of the runs' configs if all finished runs have the same; else None."""
    named = [run.spec.config.columns for run in finished]
    return named[0] if named and all(columns == named[0] for columns in named) else None


def choose(columns: Sequence[str], runs: Sequence[Run | MeasuredModel]) -> list[Metric]:
    """Return the metrics of these names: `val/ppl`, `redundancy.min_pes`, or the last part of any.

    A name that stands for a number of every run is that one, if a run has it: `ppl` is `val/ppl`, not `quality.ppl`.

    Raises:
        UserError: a name that no finished run has, or that two analyses have, or analyses with other settings.
    """
    own = {metric.key: metric for metric in NUMBERS}
    measured = {key: metric for key, metric in own.items() if _measured(key, runs)}
    analysed = {key: of_analysis(key) for run in runs for key in run.analysed}
    chosen = []
    for column in columns:
        for known in (measured, analysed, own):
            found = [key for key in known if column in (key, short_name(key))]
            if found:
                break
        if len(found) != 1:
            what = f"may be {' or '.join(sorted(found))}" if found else "is none of them"
            raise UserError(f"columns: {column} {what}; there is {', '.join([*own, *sorted(analysed)])}")
        chosen.append(known[found[0]])
    refuse_unlike({metric.where.rstrip(".") for metric in chosen if metric.key in analysed}, runs)
    return chosen


def of_analysis(key: str) -> Metric:
    """Return the metric of an analysis's number, such as `routing.seu`; what `seu` is of a run holds for it too.

    `ppl_drop_1` and its like are perplexities too; `ppl_se` is a standard error.
    """
    analysis, _, name = key.partition(".")
    perplexity = name.startswith("ppl_") and not name.endswith("_se")
    known = NAMED.get(name, Metric(name, key, "", ratio=perplexity, margin=perplexity))
    return replace(known, title=key, number="{:.4g}", where=f"{analysis}.")


def refuse_unlike(analyses: Iterable[str], runs: Sequence[Run | MeasuredModel]) -> None:
    """Raise `UserError` if one of the analyses was done with other settings in one run than in another."""
    for analysis in analyses:
        done = [run for run in runs if analysis in run.analyses]
        for run in done[1:]:
            if run.analyses[analysis]["settings"] != done[0].analyses[analysis]["settings"]:
                raise UserError(
                    f"{done[0].path} and {run.path} cannot stand in one table: {analysis} was done with other settings"
                )


def _measured(key: str, runs: Sequence[Run | MeasuredModel]) -> bool:
    return any(run.value(key) is not None for run in runs)
