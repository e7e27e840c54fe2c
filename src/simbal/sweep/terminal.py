"""Prints a table for people: no number is ever cut short, however narrow the terminal."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table as Grid

from simbal.console import new_grid
from simbal.sweep.arms import ABSENT, short_columns
from simbal.sweep.metric import Metric
from simbal.sweep.statistics import PairedDifference
from simbal.sweep.table import Row, Table


def show(table: Table, out: Console) -> None:
    """Print the means, the differences to the baseline, the runs that are missing, and the notes."""
    if table.rows:
        _show_fitting(table.metrics, lambda metrics, separator: _means(table, metrics, separator), out)
    if differences := [row for row in table.rows if row.differences]:
        out.print(_differences(table, differences))
    if table.absent:
        out.print(_absent(table))
    for note in table.notes:
        out.print(note, style="dim")


def seed_spans(seeds: Sequence[int]) -> str:
    """`0-4,7` for the seeds 0, 1, 2, 3, 4 and 7."""
    spans: list[list[int]] = []
    for seed in sorted(seeds):
        if spans and seed == spans[-1][1] + 1:
            spans[-1][1] = seed
        else:
            spans.append([seed, seed])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)


def difference_cells(metric: Metric, difference: PairedDifference) -> tuple[str, str, str]:
    """Difference, interval and number of pairs."""
    if difference.low is None or difference.high is None:
        return _signed(metric, difference.mean), ABSENT, str(difference.pairs)
    interval = f"{_signed(metric, difference.low)} to {_signed(metric, difference.high)}"
    return _signed(metric, difference.mean), interval, str(difference.pairs)


def _signed(metric: Metric, value: float) -> str:
    return metric.number.replace("{:", "{:+").format(value)


def _show_fitting(metrics: Sequence[Metric], draw: Callable[[Sequence[Metric], str], Grid], out: Console) -> None:
    """One line to a cell if that fits, else two, else half of the metrics at a time."""
    for separator in (" ", "\n"):
        grid = draw(metrics, separator)
        if out.measure(grid, options=out.options.update(max_width=10_000)).maximum <= out.width:
            out.print(grid)
            return
    if len(metrics) == 1:
        out.print(grid)
        return
    half = (len(metrics) + 1) // 2
    _show_fitting(metrics[:half], draw, out)
    _show_fitting(metrics[half:], draw, out)


def _means(table: Table, metrics: Sequence[Metric], separator: str) -> Grid:
    grid = new_grid(f"{table.name}: mean ± standard deviation over seeds")
    for column in short_columns(table.columns):
        grid.add_column(column, overflow="fold")
    grid.add_column("n", justify="right")
    grid.add_column("seeds", overflow="fold")
    for metric in metrics:
        title = metric.title if separator == " " else _two_lines(metric.title)
        grid.add_column(f"{title} {metric.arrow}".rstrip(), justify="right", overflow="fold")
    for row in table.rows:
        cells = [_mean(metric, row, separator) for metric in metrics]
        grid.add_row(*row.arm.label.values(), str(len(row.arm.runs)), seed_spans(row.arm.seeds), *cells)
    return grid


def _two_lines(title: str) -> str:
    """A title of several words, broken where its halves are most alike in length."""
    breaks = [place for place, letter in enumerate(title) if letter == " "]
    middle = min(breaks, key=lambda place: abs(2 * place - len(title)), default=len(title))
    return f"{title[:middle]}\n{title[middle + 1 :]}".rstrip()


def _mean(metric: Metric, row: Row, separator: str) -> str:
    summary = row.summaries[metric.key]
    text = metric.write(summary, separator)
    if summary is not None and summary.n < len(row.arm.runs):
        return f"{text}{separator}(n={summary.n})"
    return text


def _differences(table: Table, rows: Sequence[Row]) -> Grid:
    grid = new_grid(f"paired difference to {table.baseline} on the seeds that both have")
    grid.add_column("arm", overflow="fold")
    grid.add_column("metric", overflow="fold")
    for heading in ("difference", "95% interval", "pairs"):
        grid.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        name = row.arm.name
        for metric in table.metrics:
            if metric.key in row.differences:
                grid.add_row(name, metric.heading, *difference_cells(metric, row.differences[metric.key]))
                name = ""
    return grid


def _absent(table: Table) -> Grid:
    grid = new_grid("runs without a result; console.log in their folders may say more")
    for heading in ("run", "status", "error", "folder"):
        grid.add_column(heading, overflow="fold")
    for label, run in table.absent:
        grid.add_row(f"{label} seed={run.seed}", *absence(run.record), run.path.name)
    return grid


def absence(record: dict[str, object] | None) -> tuple[str, str]:
    """Status and error of a run without a result."""
    if record is None:
        return "unfinished", ""
    return str(record["status"]), str(record.get("error", ""))
