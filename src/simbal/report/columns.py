"""The numeric columns that a table can have, and their cells."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from simbal.errors import UserError
from simbal.metrics.definitions import NUMBERS, Metric, short_name
from simbal.report.collect import Measured, MeasuredModel, Run

ABSENT = "—"
NAMED = {metric.name: metric for metric in NUMBERS}
MODEL_COLUMNS = (  # default columns for Hugging Face models
    "quality.bpb", "quality.ppl", "redundancy.min_pes", "routing.seu", "routing.max_vio", "routing.unique_experts",
    "routing.entropy", "orthogonality.gram_deviation",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A cell of a table as plain text."""

    text: str
    value: float | None = None  # the number in the text, used to sort a column
    aside: str = ""  # secondary text, shown after or below the text
    href: str = ""  # a link, relative to the folder of the table
    muted: bool = False  # shown faintly

    @property
    def line(self) -> str:
        """The cell on one line."""
        return f"{self.text} {self.aside}" if self.aside else self.text

    @property
    def lines(self) -> str:
        """The cell on two lines, with its aside or the end of its interval below."""
        return f"{self.text}\n{self.aside}" if self.aside else self.text.replace(" to ", " to\n")


def number_cell(number: str, value: float | None) -> Cell:
    """Return a number in the format `number`; a dash for None."""
    return Cell(ABSENT if value is None else number.format(value), value)


def interval_cell(number: str, low: float | None, high: float | None) -> Cell:
    """Return `low to high`; a dash if there is no interval."""
    if low is None or high is None:
        return Cell(ABSENT)
    return Cell(f"{number.format(low)} to {number.format(high)}", low)


def default_columns(finished: Sequence[Run], models: Sequence[MeasuredModel] = ()) -> list[Metric]:
    """Return the config key `columns` if it is the same in all runs, or else the default columns that have numbers."""
    named = [run.spec.config.columns for run in finished]
    if named and named[0] is not None and all(columns == named[0] for columns in named):
        return choose_columns(named[0], [*finished, *models])
    of_runs = [metric for metric in NUMBERS if metric.column and _measured(metric.key, finished)]
    return of_runs + [analysis_metric(key) for key in MODEL_COLUMNS if _measured(key, models)]


def choose_columns(columns: Sequence[str], measured: Sequence[Measured]) -> list[Metric]:
    """Return the metrics with these names: `val/ppl`, `redundancy.min_pes`, or the last part of either.

    A run's own metric takes precedence over an analysis: `ppl` is `val/ppl`, not `quality.ppl`.

    Raises:
        UserError: a name is unknown or ambiguous, or runs have an analysis with different settings.
    """
    own = {metric.key: metric for metric in NUMBERS}
    own_measured = {key: metric for key, metric in own.items() if _measured(key, measured)}
    analyzed = {key: analysis_metric(key) for one in measured for key in one.analyzed}
    chosen = []
    for column in columns:
        for known in (own_measured, analyzed, own):
            matches = [key for key in known if column in (key, short_name(key))]
            if matches:
                break
        if len(matches) > 1:
            raise UserError(f"columns: {column} may be {' or '.join(sorted(matches))}")
        if not matches:
            closest = get_close_matches(column, [*own, *analyzed], 5, 0)
            raise UserError(f"columns: no run has {column}; the closest are {', '.join(closest)}")
        chosen.append(known[matches[0]])
    for analysis in {metric.where.rstrip(".") for metric in chosen if metric.key in analyzed}:
        if unlike := unlike_settings(analysis, measured):
            first, second = (one.path for one in unlike)
            raise UserError(f"{first} and {second} cannot be compared: the analysis {analysis} has different settings")
    return chosen


def analysis_metric(key: str) -> Metric:
    """Return the metric for a number of an analysis: `routing.seu` has the direction and unit of the run's own `seu`.

    `ppl_drop_1` and the like are perplexities; `ppl_se` is a standard error.
    """
    analysis, _, name = key.partition(".")
    perplexity = name.startswith("ppl_") and not name.endswith("_se")
    known = NAMED.get(name, Metric(name, key, "", ratio=perplexity, margin=perplexity))
    return replace(known, title=key, number="{:.4g}", where=f"{analysis}.")


def unlike_settings(analysis: str, measured: Sequence[Measured]) -> tuple[Measured, Measured] | None:
    """Return two runs that have an analysis with different settings; None if there are none."""
    done = [one for one in measured if analysis in one.analyses]
    unlike = (one for one in done if one.analyses[analysis]["settings"] != done[0].analyses[analysis]["settings"])
    second = next(unlike, None)
    return (done[0], second) if second else None


def _measured(key: str, measured: Sequence[Measured]) -> bool:
    return any(one.value(key) is not None for one in measured)
