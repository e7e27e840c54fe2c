"""The sections of a table as headings and cells, the same on the terminal, in files and on the page."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from urllib.parse import quote

from simbal.metrics.definitions import Metric
from simbal.report import paper
from simbal.report.arms import seed_spans, short_columns
from simbal.report.collect import Run
from simbal.report.columns import ABSENT, Cell, interval_cell, number_cell
from simbal.report.comparison import Row
from simbal.report.conclusion import UNRESOLVED
from simbal.report.statistics import PairedDifference, Summary, relative
from simbal.report.table import Table
from simbal.report.tokens_to_loss import TokensToLoss
from simbal.runs.record import error_of

DIFFERENCE_HEADINGS = (
    "difference", "95% interval", "over documents", "conclusion", "detectable", "p", "p (Holm)", "d_z", "Welch p",
    "pairs",
)  # fmt: skip
TOKENS_HEADINGS = ("tokens needed", "saved", "95% interval", "not reached", "saved by slope", "its interval", "seeds")
SMALLEST_P = 0.001  # below it the digits mean nothing with so few seeds


@dataclass(frozen=True)
class Section:
    """A part of a table, with headings and rows of its own."""

    title: str
    headings: list[str]
    rows: list[list[Cell]]
    texts: int  # how many of the first columns are text; the others are numbers
    arms: list[str] = field(default_factory=list)  # the name of each row's arm; none if the rows are of no arms

    @property
    def lines(self) -> list[list[str]]:
        """The text of every cell on one line, by row."""
        return [[cell.line for cell in row] for row in self.rows]

    def select(self, headings: Sequence[str]) -> "Section":
        """Return the section with its columns of text and, of the others, those with these headings."""
        kept = [i for i, heading in enumerate(self.headings) if i < self.texts or heading in headings]
        rows = [[row[i] for i in kept] for row in self.rows]
        return Section(self.title, [self.headings[i] for i in kept], rows, self.texts, self.arms)


@lru_cache(maxsize=1)  # the same for each rendering
def sections(table: Table) -> list[Section]:
    """Return all sections that have rows, in their order."""
    found = (means(table), differences(table), tokens_to_loss(table), absent(table))
    return [section for section in found if section.rows]


def means(table: Table, short: bool = False) -> Section:
    """Return each arm's mean ± standard deviation, and the numbers of models below.

    The paper's number stands beside where the table has it. A number whose difference to the baseline is not resolved
    is muted. With `short`, label columns are headed by the last part of their keys.
    """
    headings = [*(short_columns(table.columns) if short else table.columns), "n", "seeds"]
    beside = [metric for metric in table.metrics if any(metric.key in row.reported for row in table.rows)]
    for metric in table.metrics:
        headings += [metric.heading, paper.HEADING] if metric in beside else [metric.heading]
    rows = []
    for row in table.rows:
        cells = [*row.arm.label.values(), number_cell("{}", len(row.arm.runs)), Cell(seed_spans(row.arm.seeds))]
        for metric in table.metrics:
            difference = row.differences.get(metric.key)
            unresolved = difference is not None and difference.conclusion == UNRESOLVED
            mean = mean_cell(metric.number, row.summaries[metric.key], len(row.arm.runs))
            cells.append(replace(mean, muted=unresolved))
            if metric in beside:
                cells.append(paper.paper_cell(metric, row.reported.get(metric.key)))
        rows.append(cells)
    for model in table.models:
        cells = model.cells(table.columns, table.metrics)
        for place, metric in reversed([*enumerate(table.metrics, len(table.columns) + 2)]):
            if metric in beside:
                cells.insert(place + 1, Cell(ABSENT))
        rows.append(cells)
    title = f"{table.name}: mean ± standard deviation over seeds" if table.rows else f"{table.name}: models"
    names = [*(row.arm.name for row in table.rows), *(model.name for model in table.models)]
    return Section(title, headings, rows, len(table.columns) + 2, names)


def mean_cell(number: str, summary: Summary | None, seeds: int | None = None) -> Cell:
    """Return the mean, aside ± the standard deviation of several seeds; a dash for None.

    The number of values stands aside too where it is not `seeds`, the number of the arm's seeds.
    """
    if summary is None:
        return Cell(ABSENT)
    asides = [] if summary.sd is None else [f"± {number.format(summary.sd)}"]
    asides += [f"(n={summary.n})"] if seeds is not None and summary.n < seeds else []
    return Cell(number.format(summary.mean), summary.mean, " ".join(asides))


def compared(table: Table) -> list[tuple[Row, Metric]]:
    """Return the arms and metrics that the section of differences has rows for, in their order."""
    return [(row, metric) for row in table.compared for metric in table.metrics if metric.key in row.differences]


def comparison_name(table: Table, row: Row) -> str:
    """Return the name of the arm, and of the other one where two are compared that have different ones."""
    two = table.pairs and row.other and row.other.name != row.arm.name
    return f"{row.arm.name} - {row.other.name}" if two and row.other else row.arm.name


def differences(table: Table) -> Section:
    """Return the section with a row for each arm and metric.

    The corrected p stands there only where several arms are compared, and the interval over documents only where the
    runs have documents.
    """
    rows: list[list[Cell]] = []
    arms: list[str] = []
    for row, metric in compared(table):
        name = comparison_name(table, row)
        rows.append(
            [
                Cell("" if arms[-1:] == [name] else name),
                Cell(metric.heading),
                *difference_cells(metric, row.differences[metric.key]),
            ]
        )
        arms.append(name)
    to = f"of {table.pairs_of}" if table.pairs else f"to {table.baseline}"
    title = f"paired difference {to} on the seeds that both have"
    whole = Section(title, ["arm", "metric", *DIFFERENCE_HEADINGS], rows, 2, arms)
    found = [row.differences[metric.key] for row, metric in compared(table)]
    unused = {
        "p (Holm)": all(difference.p_holm is None for difference in found),
        "over documents": all(difference.over_documents is None for difference in found),
    }
    return whole.select([heading for heading in DIFFERENCE_HEADINGS if not unused.get(heading)])


def difference_cells(metric: Metric, difference: PairedDifference) -> tuple[Cell, ...]:
    """Return the cells under DIFFERENCE_HEADINGS; a dash for what needs more seeds than there are."""
    over = difference.over_documents
    documents = [on_scale(difference, end) for end in ((over.low, over.high) if over else (None, None))]
    number = "{:+.1%}" if difference.scale == "ln" else metric.number.replace("{:", "{:+")
    mean, low, high = (on_scale(difference, value) for value in (difference.mean, difference.low, difference.high))
    return (
        number_cell(number, mean),
        interval_cell(number, low, high),
        interval_cell(number, *documents),
        Cell(difference.conclusion),
        number_cell(number.replace("+", ""), on_scale(difference, difference.detectable)),
        _p(difference.p),
        _p(difference.p_holm),
        number_cell("{:+.2f}", difference.effect),
        _p(difference.welch.p if difference.welch else None),
        number_cell("{}", difference.pairs),
    )


def tokens_to_loss(table: Table) -> Section:
    """Return the share of the baseline's tokens that each arm needs to become as good."""
    found = [(row.arm.name, row.tokens_to_loss) for row in table.rows if row.tokens_to_loss]
    rows = [[Cell(name), *tokens_cells(tokens)] for name, tokens in found]
    title = f"training tokens to reach {table.baseline}'s final validation loss, as a share of its own"
    return Section(title, ["arm", *TOKENS_HEADINGS], rows, 1, [name for name, _ in found])


def tokens_cells(tokens: TokensToLoss) -> tuple[Cell, ...]:
    """Return the cells under TOKENS_HEADINGS; no mean where a seed did not reach the loss."""
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
    """Return the section of the runs without a result; those that began have a link to their folder."""
    rows = []
    for label, run in table.absent:
        status, error = absence(run)
        folder = Cell(run.path.name, href=folder_link(run))
        rows.append([Cell(f"{label} seed={run.seed}"), Cell(status), Cell(error or ABSENT), folder])
    rows += [
        [Cell(label), Cell("missing"), Cell("not started"), Cell(folder)] for folder, label in table.missing.items()
    ]
    title = "runs without a result; console.log in their folders may say more"
    return Section(title, ["run", "status", "error", "folder"], rows, 4)


def absence(run: Run) -> tuple[str, str]:
    """Return status and error of a run without a result."""
    if run.record is None:
        return ("damaged", run.damage) if run.damage else ("unfinished", "")
    return str(run.record["status"]), error_of(run.record)


def folder_link(run: Run) -> str:
    """Return a link to a run's folder, relative to the folder of its sweep."""
    return f"./{quote(run.path.name)}/"


def on_scale(difference: PairedDifference, value: float | None) -> float | None:
    """Return a difference as it is shown: one of logarithms as a relative change."""
    return value if value is None or difference.scale == "difference" else relative(value)


def _p(p: float | None) -> Cell:
    return Cell(f"<{SMALLEST_P}", p) if p is not None and p < SMALLEST_P else number_cell("{:.3f}", p)
