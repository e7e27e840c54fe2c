"""The sections of a table as headings and cells, which the terminal, the files and the page all show."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import exp, sqrt
from statistics import fmean
from urllib.parse import quote

from simbal.errors import UserError
from simbal.metrics.definitions import Metric
from simbal.report import paper
from simbal.report.arms import seed_ranges, short_columns
from simbal.report.collect import Run
from simbal.report.columns import ABSENT, Cell, interval_cell, number_cell
from simbal.report.comparison import Row
from simbal.report.largest_t import ALPHA
from simbal.report.simultaneous import POWER, Interval, seeds_to_equate, seeds_to_resolve
from simbal.report.statistics import UNRESOLVED, Difference, Summary, relative
from simbal.report.table import Table
from simbal.runs.record import error_of

OPTIONAL = ("over documents",)  # columns of differences that are left out if they are empty
SUMMARY_COLUMNS = ("val/ppl", "val/max_vio", "val/unique_experts", "val/seu", "tokens_per_second")
LONGEST_BASELINE = 12  # characters of the baseline's name in a heading
SMALLEST_P = 0.001  # smaller p-values are not meaningful with so few seeds


@dataclass(frozen=True)
class Section:
    """A part of a table with its own headings and rows."""

    title: str
    headings: list[str]
    rows: list[list[Cell]]
    texts: int  # the number of text columns, which come first
    arms: list[str] = field(default_factory=list)  # the name of each row's arm, if rows belong to arms

    @classmethod
    def from_cells(cls, title: str, rows: Sequence[dict[str, Cell]], texts: int, arms: Sequence[str] = ()) -> "Section":
        """Return a section from rows with the same headings."""
        return cls(title, [*rows[0]] if rows else [], [[*row.values()] for row in rows], texts, [*arms])

    @property
    def lines(self) -> list[list[str]]:
        """The text of every cell on one line, by row."""
        return [[cell.line for cell in row] for row in self.rows]

    def without(self, columns: Collection[int]) -> "Section":
        """Return the section without these columns."""
        kept = [place for place in range(len(self.headings)) if place not in columns]
        rows = [[row[place] for place in kept] for row in self.rows]
        return replace(self, headings=[self.headings[place] for place in kept], rows=rows)


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
            mean = _mean_cell(metric.number, row.summaries[metric.key], len(row.arm.runs))
            cells.append(replace(mean, muted=difference is not None and difference.conclusion == UNRESOLVED))
            if metric in with_paper:
                cells.append(paper.paper_cell(metric, row.reported.get(metric.key)))
        rows.append(cells)
    for model in table.models:
        cells = [Cell(model.name), *(Cell(ABSENT) for _ in table.columns[1:]), number_cell("{}", 1), Cell(ABSENT)]
        for metric in table.metrics:
            cells.append(number_cell(metric.number, model.value(metric.key)))
            cells += [Cell(ABSENT)] if metric in with_paper else []
        rows.append(cells)
    for name, loss in table.ngram_losses.items():
        cells = [Cell(name), *(Cell(ABSENT) for _ in range(len(table.columns) + 1))]
        for metric in table.metrics:
            cells.append(_ngram_cell(table, metric, loss))
            cells += [Cell(ABSENT)] if metric in with_paper else []
        rows.append(cells)
    title = f"{table.name}: mean ± standard deviation over seeds" if table.rows else f"{table.name}: models"
    names = [*(row.arm.name for row in table.rows), *(model.name for model in table.models)]
    names += table.ngram_losses
    return Section(title, headings, rows, len(table.columns) + 2, names)


def _mean_cell(number: str, summary: Summary | None, seeds: int) -> Cell:
    """Return the mean with its standard deviation as an aside, and the number of values if some seeds have none."""
    if summary is None:
        return Cell(ABSENT)
    asides = [] if summary.sd is None else [f"± {number.format(summary.sd)}"]
    asides += [f"(n={summary.n})"] if summary.n < seeds else []
    return Cell(number.format(summary.mean), summary.mean, " ".join(asides))


def _ngram_cell(table: Table, metric: Metric, loss: float) -> Cell:
    """Return the loss of an n-gram model in the unit of the metric; a dash if the metric is not a loss."""
    run = table.rows[0].arm.runs[0]
    model_loss, model_bits = run.value("val/loss"), run.value("val/bpb")
    bits = loss * model_bits / model_loss if model_loss and model_bits else None
    return number_cell(metric.number, {"val/loss": loss, "val/ppl": exp(loss), "val/bpb": bits}.get(metric.key))


def summary(table: Table) -> Section:
    """Return what the terminal shows by default: means, and the difference and conclusion of the first metric."""
    shown = [metric for metric in table.metrics if table.chosen or table.models or metric.key in SUMMARY_COLUMNS]
    section = means(replace(table, metrics=shown), short=True)
    section = section.without([section.headings.index("n")])
    compared = next((metric for metric in shown if any(metric.key in row.differences for row in table.rows)), None)
    if compared is None:
        return section
    by_arm = {row.arm.name: row.differences.get(compared.key) for row in table.rows}
    place = section.headings.index(compared.heading) + 1
    rows = []
    for name, cells in zip(section.arms, section.rows, strict=True):
        difference, word = Cell(ABSENT), Cell(ABSENT)
        if one := by_arm.get(name):
            found = difference_cells(compared, one)
            ends = found["95% interval"].text.replace(" to ", ", ")
            difference = Cell(found["difference"].text, aside="" if ends == ABSENT else f"[{ends}]")
            word = found["conclusion"]
        rows.append([*(replace(cell, muted=False) for cell in cells[:place]), difference, word, *cells[place:]])
    to = table.baseline if len(table.baseline or "") <= LONGEST_BASELINE else "baseline"
    headings = [*section.headings[:place], f"vs. {to}", "conclusion", *section.headings[place:]]
    return replace(section, headings=headings, rows=rows)


def compared_metrics(table: Table) -> list[tuple[Row, Metric]]:
    """Return each row and metric that has a difference, in order."""
    return [(row, metric) for row in table.compared for metric in table.metrics if metric.key in row.differences]


def comparison_name(table: Table, row: Row) -> str:
    """Return the name of the arm, or `arm - other` if two arms of different names are compared."""
    two_names = table.pairs and row.other and row.other.name != row.arm.name
    return f"{row.arm.name} - {row.other.name}" if two_names and row.other else row.arm.name


def differences(table: Table) -> Section:
    """Return a row for each arm and metric; empty columns are left out."""
    rows, arms = list[dict[str, Cell]](), list[str]()
    for row, metric in compared_metrics(table):
        name = comparison_name(table, row)
        first = {"arm": Cell("" if arms[-1:] == [name] else name), "metric": Cell(metric.heading)}
        rows.append(first | difference_cells(metric, row.differences[metric.key]))
        arms.append(name)
    to = f"of {table.pairs_of}" if table.pairs else f"from {table.baseline}"
    section = Section.from_cells(f"paired difference {to} on shared seeds", rows, 2, arms)
    empty = [heading for heading in OPTIONAL if rows and all(row[heading].value is None for row in rows)]
    return section.without([*map(section.headings.index, empty)])


def difference_cells(metric: Metric, difference: Difference) -> dict[str, Cell]:
    """Return the cells of a difference by heading; a dash for numbers that need more seeds."""
    over, welch = difference.over_documents, difference.welch
    number = "{:+.1%}" if difference.scale == "ln" else metric.number.replace("{:", "{:+")
    ends = (difference.low, difference.high, over.low if over else None, over.high if over else None)
    low, high, over_low, over_high = (on_scale(difference, end) for end in ends)
    return {
        "difference": number_cell(number, on_scale(difference, difference.mean)),
        "95% interval": interval_cell(number, low, high),
        "over documents": interval_cell(number, over_low, over_high),
        "conclusion": Cell(difference.conclusion or ABSENT),
        "detectable": number_cell(number.replace("+", ""), on_scale(difference, difference.detectable)),
        "p": _p_cell(difference.p),
        "p (paired)": _p_cell(difference.p_paired),
        "d_z": number_cell("{:+.2f}", difference.effect),
        "Welch p": _p_cell(welch.p if welch else None),
        "pairs": number_cell("{}", difference.pairs),
    }


def on_scale(difference: Difference, value: float | None) -> float | None:
    """Return a value of a difference as displayed: logarithms become relative changes."""
    return value if value is None or difference.scale == "difference" else relative(value)


def tokens_to_loss(table: Table) -> Section:
    """Return the fraction of the baseline's tokens that each arm needs to reach the baseline's loss."""
    rows = []
    for row in table.rows:
        if (tokens := row.tokens_to_loss) is None:
            continue
        missed, seeds = len(tokens.missed), len(tokens.shares)
        share, low, high = tokens.by_slope.shares if tokens.by_slope else (None, None, None)
        cells = {
            "arm": Cell(row.arm.name),
            "tokens needed": number_cell("{:.1%}", None if tokens.saving is None else 1 - tokens.saving),
            "saved": number_cell("{:+.1%}", tokens.saving),
            "95% interval": interval_cell("{:+.1%}", tokens.low, tokens.high),
            "not reached": Cell(f"in {missed} of {seeds} seeds" if missed else "in none", missed),
            "saved by slope": number_cell("{:+.1%}", share),
            "its interval": interval_cell("{:+.1%}", low, high),
            "seeds": number_cell("{}", seeds),
        }
        rows.append(cells)
    title = f"training tokens to reach {table.baseline}'s final validation loss, relative to {table.baseline}'s tokens"
    return Section.from_cells(title, rows, 1, [row["arm"].text for row in rows])


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

    The estimated noise is taken as the true noise. Hours are for both runs of a pair, one after the other.
    """
    margin = table.margin
    if margin is None:
        raise UserError("power=true: the runs have different margins; choose one with equivalence_margin=")
    rows = []
    for row, metric in compared_metrics(table):
        difference = row.differences[metric.key]
        error, degrees, largest = difference.error, difference.degrees, difference.largest
        if not metric.margin or error is None or degrees is None or largest is None or row.other is None:
            continue
        interval = Interval(difference.mean, error, degrees, largest, ALPHA)
        hours = sum(fmean(run.result["seconds"] for run in arm.runs) / 3600 for arm in (row.arm, row.other))
        resolve = max(0, seeds_to_resolve(interval, difference.pairs, margin) - difference.pairs)
        equate = max(0, seeds_to_equate(interval, difference.pairs, margin) - difference.pairs)
        cells = {
            "arm": Cell(comparison_name(table, row)),
            "metric": Cell(metric.heading),
            "noise in nats": number_cell("{:.4f}", error * sqrt(difference.pairs)),
            "pairs": number_cell("{}", difference.pairs),
            "more to detect": Cell(f"{resolve:,}", resolve, f"({resolve * hours:,.1f} h)"),
            "more for equivalence": Cell(f"{equate:,}", equate, f"({equate * hours:,.1f} h)"),
        }
        rows.append(cells)
    if not rows:
        raise UserError(
            "power=true needs at least two pairs of seeds with a loss or perplexity below a unigram model's"
        )
    title = (
        f"additional pairs of seeds for {POWER:.0%} power, to detect a true difference of {margin:g} nats per token "
        "or to show equivalence, with the intervals of this table"
    )
    return Section.from_cells(title, rows, 2)


def _p_cell(p: float | None) -> Cell:
    return Cell(f"<{SMALLEST_P}", p) if p is not None and p < SMALLEST_P else number_cell("{:.3f}", p)
