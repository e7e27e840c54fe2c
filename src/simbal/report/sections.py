"""The sections of a table as headings and cells of text, the same on the terminal, in files and on the page."""

from collections.abc import Sequence
from dataclasses import dataclass

from simbal.report import paper
from simbal.report.arms import ABSENT, seed_spans
from simbal.report.collect import Run
from simbal.report.compare import Row, TokensToLoss
from simbal.report.metric import Metric
from simbal.report.statistics import PairedDifference
from simbal.report.table import Table
from simbal.runs.record import error_of

DIFFERENCE_HEADINGS = ("difference", "95% interval", "p", "p (Holm)", "d_z", "Welch p", "pairs")
TOKENS_HEADINGS = ("tokens needed", "saved", "95% interval", "seeds", "not reached")
SMALLEST_P = 0.001  # below it the digits mean nothing with so few seeds


@dataclass(frozen=True)
class Section:
    """A part of a table, with headings and rows of its own."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    texts: int  # how many of the first columns are text; the others are numbers

    def select(self, headings: Sequence[str]) -> "Section":
        """Return the section with its columns of text and, of the others, those with these headings."""
        kept = [i for i, heading in enumerate(self.headings) if i < self.texts or heading in headings]
        rows = [[row[i] for i in kept] for row in self.rows]
        return Section(self.title, [self.headings[i] for i in kept], rows, self.texts)


def sections(table: Table) -> list[Section]:
    """Return all sections that have rows, in their order."""
    found = (means(table, table.metrics), differences(table), tokens_to_loss(table), absent(table))
    return [section for section in found if section.rows]


def means(table: Table, metrics: Sequence[Metric], separator: str = " ") -> Section:
    """Return each arm's mean ± standard deviation; the paper's number beside it where the table has it.

    Args:
        table: the table that has the arms.
        metrics: those of its columns that are wanted.
        separator: between the parts of a cell; a newline makes columns narrow.
    """
    headings = [*table.columns, "n", "seeds"]
    beside = [metric for metric in metrics if any(metric.key in row.reported for row in table.rows)]
    for metric in metrics:
        headings += [metric.heading, paper.HEADING] if metric in beside else [metric.heading]
    rows = []
    for row in table.rows:
        cells = [*row.arm.label.values(), str(len(row.arm.runs)), seed_spans(row.arm.seeds)]
        for metric in metrics:
            cells.append(mean_cell(metric, row, separator))
            if metric in beside:
                cells.append(paper.write(metric.key, row.reported.get(metric.key), separator))
        rows.append(cells)
    return Section(f"{table.name}: mean ± standard deviation over seeds", headings, rows, len(table.columns) + 2)


def mean_cell(metric: Metric, row: Row, separator: str = " ") -> str:
    """Return `mean ± sd`, and the number of seeds where not all of the arm's have the metric."""
    summary = row.summaries[metric.key]
    text = metric.write(summary, separator)
    if summary is not None and summary.n < len(row.arm.runs):
        return f"{text}{separator}(n={summary.n})"
    return text


def differences(table: Table) -> Section:
    """Return the section with a row for each arm and metric; the corrected p only where several arms are compared."""
    rows = []
    for row in table.rows:
        compared = [metric for metric in table.metrics if metric.key in row.differences]
        for metric in compared:
            name = row.arm.name if metric is compared[0] else ""
            rows.append([name, metric.heading, *difference_cells(metric, row.differences[metric.key])])
    title = f"paired difference to {table.baseline} on the seeds that both have"
    whole = Section(title, ["arm", "metric", *DIFFERENCE_HEADINGS], rows, 2)
    corrected = any(difference.p_holm is not None for row in table.rows for difference in row.differences.values())
    return whole if corrected else whole.select([h for h in DIFFERENCE_HEADINGS if h != "p (Holm)"])


def difference_cells(metric: Metric, difference: PairedDifference) -> tuple[str, ...]:
    """Return the cells under DIFFERENCE_HEADINGS; a dash for what needs more seeds than there are."""
    low, high = difference.low, difference.high
    return (
        _signed(metric, difference.mean),
        ABSENT if low is None or high is None else f"{_signed(metric, low)} to {_signed(metric, high)}",
        _p(difference.p),
        _p(difference.p_holm),
        ABSENT if difference.effect is None else f"{difference.effect:+.2f}",
        _p(difference.welch.p if difference.welch else None),
        str(difference.pairs),
    )


def tokens_to_loss(table: Table) -> Section:
    """Return the share of the baseline's tokens that each arm needs to become as good."""
    rows = [[row.arm.name, *tokens_cells(row.tokens_to_loss)] for row in table.rows if row.tokens_to_loss]
    title = f"training tokens to reach {table.baseline}'s final validation loss, as a share of its own"
    return Section(title, ["arm", *TOKENS_HEADINGS], rows, 1)


def tokens_cells(tokens: TokensToLoss) -> tuple[str, ...]:
    """Return the cells under TOKENS_HEADINGS; no mean where a seed did not reach the loss."""
    low, high, missed, seeds = tokens.low, tokens.high, tokens.missed, len(tokens.shares)
    return (
        ABSENT if tokens.saving is None else f"{1 - tokens.saving:.1%}",
        ABSENT if tokens.saving is None else f"{tokens.saving:+.1%}",
        ABSENT if low is None or high is None else f"{low:+.1%} to {high:+.1%}",
        str(seeds),
        f"in {len(missed)} of {seeds} seeds" if missed else "in none",
    )


def absent(table: Table) -> Section:
    """Return the section of the runs without a result."""
    rows = [[f"{label} seed={run.seed}", *absence(run), run.path.name] for label, run in table.absent]
    rows += [[label, "missing", "not started", folder] for folder, label in table.missing.items()]
    title = "runs without a result; console.log in their folders may say more"
    return Section(title, ["run", "status", "error", "folder"], rows, 4)


def absence(run: Run) -> tuple[str, str]:
    """Return status and error of a run without a result."""
    if run.record is None:
        return ("damaged", run.damage) if run.damage else ("unfinished", "")
    return str(run.record["status"]), error_of(run.record)


def _p(p: float | None) -> str:
    if p is None:
        return ABSENT
    return f"<{SMALLEST_P}" if p < SMALLEST_P else f"{p:.3f}"


def _signed(metric: Metric, value: float) -> str:
    return metric.number.replace("{:", "{:+").format(value)
