"""The sections of a table as headings and cells, which the terminal, the files and the page all show."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean
from urllib.parse import quote

from simbal.errors import UserError
from simbal.metrics.definitions import Metric
from simbal.report import paper
from simbal.report.arms import seed_ranges, short_columns
from simbal.report.collect import Run
from simbal.report.columns import ABSENT, Cell, interval_cell, number_cell
from simbal.report.comparison import Row
from simbal.report.statistics import (
    POWER,
    UNRESOLVED,
    PairedDifference,
    Summary,
    pairs_to_equate,
    pairs_to_resolve,
    relative,
)
from simbal.report.table import Table
from simbal.report.tokens_to_loss import TokensToLoss
from simbal.runs.record import error_of

DIFFERENCE_HEADINGS = (
    "difference", "95% interval", "over documents", "conclusion", "detectable", "p", "p (Holm)", "d_z", "Welch p",
    "pairs",
)  # fmt: skip
TOKENS_HEADINGS = ("tokens needed", "saved", "95% interval", "not reached", "saved by slope", "its interval", "seeds")
POWER_HEADINGS = ("spread in nats", "pairs", "more to resolve", "hours", "more to equate", "hours")
SMALLEST_P = 0.001  # smaller p-values are not meaningful with so few seeds


@dataclass(frozen=True)
class Section:
    """A part of a table with its own headings and rows."""

    title: str
    headings: list[str]
    rows: list[list[Cell]]
    texts: int  # the number of text columns, which come first
    arms: list[str] = field(default_factory=list)  # the name of each row's arm, if rows belong to arms

    @property
    def lines(self) -> list[list[str]]:
        """The text of every cell on one line, by row."""
        return [[cell.line for cell in row] for row in self.rows]

    def without(self, headings: Sequence[str]) -> "Section":
        """Return the section without the columns that have these headings."""
        kept = [place for place, heading in enumerate(self.headings) if heading not in headings]
        rows = [[row[place] for place in kept] for row in self.rows]
        return replace(self, headings=[self.headings[place] for place in kept], rows=rows)


@lru_cache(maxsize=1)  # markdown and LaTeX show the same sections
def sections(table: Table) -> list[Section]:
    """Return all sections that have rows, in order."""
    every = (means(table), differences(table), tokens_to_loss(table), absent(table))
    return [section for section in every if section.rows]


def means(table: Table, short: bool = False) -> Section:
    """Return mean ± standard deviation of each arm, followed by the Hugging Face models.

    A number is muted if its difference from the baseline is not resolved. With `short`, label columns are headed by the
    last part of their keys.
    """
    headings = [*(short_columns(table.columns) if short else table.columns), "n", "seeds"]
    with_paper = [metric for metric in table.metrics if any(metric.key in row.reported for row in table.rows)]
    for metric in table.metrics:
        headings += [metric.heading, paper.HEADING] if metric in with_paper else [metric.heading]
    rows = []
    for row in table.rows:
        cells = [*row.arm.label.values(), number_cell("{}", len(row.arm.runs)), Cell(seed_ranges(row.arm.seeds))]
        for metric in table.metrics:
            difference = row.differences.get(metric.key)
            unresolved = difference is not None and difference.conclusion == UNRESOLVED
            mean = mean_cell(metric.number, row.summaries[metric.key], len(row.arm.runs))
            cells.append(replace(mean, muted=unresolved))
            if metric in with_paper:
                cells.append(paper.paper_cell(metric, row.reported.get(metric.key)))
        rows.append(cells)
    for model in table.models:
        cells = [Cell(model.name), *(Cell(ABSENT) for _ in table.columns[1:]), number_cell("{}", 1), Cell(ABSENT)]
        for metric in table.metrics:
            cells.append(number_cell(metric.number, model.value(metric.key)))
            cells += [Cell(ABSENT)] if metric in with_paper else []
        rows.append(cells)
    title = f"{table.name}: mean ± standard deviation over seeds" if table.rows else f"{table.name}: models"
    names = [*(row.arm.name for row in table.rows), *(model.name for model in table.models)]
    return Section(title, headings, rows, len(table.columns) + 2, names)


def mean_cell(number: str, summary: Summary | None, seeds: int) -> Cell:
    """Return the mean with its standard deviation as an aside, and the number of values if some seeds have none."""
    if summary is None:
        return Cell(ABSENT)
    asides = [] if summary.sd is None else [f"± {number.format(summary.sd)}"]
    asides += [f"(n={summary.n})"] if summary.n < seeds else []
    return Cell(number.format(summary.mean), summary.mean, " ".join(asides))


def compared_metrics(table: Table) -> list[tuple[Row, Metric]]:
    """Return every row and metric that has a difference, in order."""
    return [(row, metric) for row in table.compared for metric in table.metrics if metric.key in row.differences]


def comparison_name(table: Table, row: Row) -> str:
    """Return the name of the arm, or `arm - other` if two arms of different names are compared."""
    two_names = table.pairs and row.other and row.other.name != row.arm.name
    return f"{row.arm.name} - {row.other.name}" if two_names and row.other else row.arm.name


def differences(table: Table) -> Section:
    """Return a row for each arm and metric; empty columns are left out."""
    rows: list[list[Cell]] = []
    arms: list[str] = []
    for row, metric in compared_metrics(table):
        name = comparison_name(table, row)
        cells = difference_cells(metric, row.differences[metric.key])
        rows.append([Cell("" if arms[-1:] == [name] else name), Cell(metric.heading), *cells])
        arms.append(name)
    to = f"of {table.pairs_of}" if table.pairs else f"from {table.baseline}"
    headings = ["arm", "metric", *DIFFERENCE_HEADINGS]
    section = Section(f"paired difference {to} on shared seeds", headings, rows, 2, arms)
    compared = [row.differences[metric.key] for row, metric in compared_metrics(table)]
    unused = ["p (Holm)"] if all(one.p_holm is None for one in compared) else []
    unused += ["over documents"] if all(one.over_documents is None for one in compared) else []
    return section.without(unused)


def difference_cells(metric: Metric, difference: PairedDifference) -> tuple[Cell, ...]:
    """Return the cells under DIFFERENCE_HEADINGS; a dash for numbers that need more seeds."""
    over, welch = difference.over_documents, difference.welch
    over_low, over_high = (on_scale(difference, end) for end in ((over.low, over.high) if over else (None, None)))
    number = "{:+.1%}" if difference.scale == "ln" else metric.number.replace("{:", "{:+")
    mean, low, high = (on_scale(difference, value) for value in (difference.mean, difference.low, difference.high))
    return (
        number_cell(number, mean),
        interval_cell(number, low, high),
        interval_cell(number, over_low, over_high),
        Cell(difference.conclusion),
        number_cell(number.replace("+", ""), on_scale(difference, difference.detectable)),
        _p_cell(difference.p),
        _p_cell(difference.p_holm),
        number_cell("{:+.2f}", difference.effect),
        _p_cell(welch.p if welch else None),
        number_cell("{}", difference.pairs),
    )


def on_scale(difference: PairedDifference, value: float | None) -> float | None:
    """Return a value of a difference as displayed: logarithms become relative changes."""
    return value if value is None or difference.scale == "difference" else relative(value)


def tokens_to_loss(table: Table) -> Section:
    """Return the fraction of the baseline's tokens that each arm needs to reach the baseline's loss."""
    by_arm = [(row.arm.name, row.tokens_to_loss) for row in table.rows if row.tokens_to_loss]
    rows = [[Cell(name), *tokens_cells(tokens)] for name, tokens in by_arm]
    title = f"training tokens to reach {table.baseline}'s final validation loss, relative to {table.baseline}'s tokens"
    return Section(title, ["arm", *TOKENS_HEADINGS], rows, 1, [name for name, _ in by_arm])


def tokens_cells(tokens: TokensToLoss) -> tuple[Cell, ...]:
    """Return the cells under TOKENS_HEADINGS; no mean if a seed did not reach the loss."""
    missed, seeds = len(tokens.missed), len(tokens.shares)
    share, low, high = tokens.by_slope.shares if tokens.by_slope else (None, None, None)
    return (
        number_cell("{:.1%}", None if tokens.saving is None else 1 - tokens.saving),
        number_cell("{:+.1%}", tokens.saving),
        interval_cell("{:+.1%}", tokens.low, tokens.high),
        Cell(f"in {missed} of {seeds} seeds" if missed else "in none", missed),
        number_cell("{:+.1%}", share),
        interval_cell("{:+.1%}", low, high),
        number_cell("{}", seeds),
    )


def absent(table: Table) -> Section:
    """Return the runs without a result, with their errors."""
    rows = []
    for label, run in table.absent:
        status, error = status_and_error(run)
        folder = Cell(run.path.name, href=folder_link(run))
        rows.append([Cell(f"{label} seed={run.seed}"), Cell(status), Cell(error or ABSENT), folder])
    for folder_name, label in table.missing.items():
        rows.append([Cell(label), Cell("missing"), Cell("not started"), Cell(folder_name)])
    title = "runs without a result; see console.log in their folders"
    return Section(title, ["run", "status", "error", "folder"], rows, 4)


def status_and_error(run: Run) -> tuple[str, str]:
    """Return the status and the error of a run without a result."""
    if run.record is None:
        return ("damaged", run.damage) if run.damage else ("unfinished", "")
    return str(run.record["status"]), error_of(run.record)


def folder_link(run: Run) -> str:
    """Return a link to a run folder, relative to the folder of its sweep."""
    return f"./{quote(run.path.name)}/"


def power(table: Table) -> Section:
    """Return how many more pairs of seeds each comparison of a loss or perplexity needs; `UserError` if there is none.

    The measured standard deviation is taken as the true one. Hours are for both runs of a pair, one after the other.
    """
    margin = table.margin
    if margin is None:
        raise UserError("power=true: the runs have different margins; choose one with equivalence_margin=")
    rows, names = [], []
    for row, metric in compared_metrics(table):
        difference = row.differences[metric.key]
        if not metric.margin or difference.sd is None or row.other is None:
            continue
        names.append(comparison_name(table, row))
        cells = [Cell(names[-1]), Cell(metric.heading)]
        cells += [number_cell("{:.4f}", difference.sd), number_cell("{}", difference.pairs)]
        seconds = [
            [run.result["seconds"] for run in arm.runs if "seconds" in run.result] for arm in (row.arm, row.other)
        ]
        hours = sum(map(fmean, seconds)) / 3600 if all(seconds) else None
        for needed in (pairs_to_resolve(difference.sd, margin), pairs_to_equate(difference.sd, margin)):
            more = max(0, needed - difference.pairs)
            cells += [number_cell("{:,}", more), number_cell("{:,.1f}", None if hours is None else more * hours)]
        rows.append(cells)
    if not rows:
        raise UserError("power=true needs at least two pairs of seeds with a loss or perplexity")
    title = (
        f"additional pairs of seeds for {POWER:.0%} power at 5%, to resolve a true difference of {margin:g} nats per "
        "token or to show equivalence; for a single comparison, without Holm's correction"
    )
    return Section(title, ["arm", "metric", *POWER_HEADINGS], rows, 2, names)


def _p_cell(p: float | None) -> Cell:
    return Cell(f"<{SMALLEST_P}", p) if p is not None and p < SMALLEST_P else number_cell("{:.3f}", p)
