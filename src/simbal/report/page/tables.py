"""The tables of the page: cells of text with their sort keys, which the template lays out."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from simbal.report import sections
from simbal.report.arms import ABSENT, Arm, short_columns
from simbal.report.compare import Row
from simbal.report.metric import Metric
from simbal.report.sections import Section
from simbal.report.table import Table
from simbal.runs.spec import result_keys


@dataclass(frozen=True)
class Cell:
    """A cell: its text and what stands smaller below it; a number is set right and sorted as one."""

    text: str
    aside: str = ""
    number: bool = False
    key: float | None = None
    href: str = ""


@dataclass(frozen=True)
class Bar:
    """A difference with its interval, in percent of the width of a bar; zero is at 50."""

    low: float
    mean: float
    high: float
    clear: bool  # the interval does not contain zero


@dataclass(frozen=True)
class Line:
    """A row of a table; `arm` is the one whose colour it has, or empty."""

    arm: str
    cells: list[Cell]
    bar: Bar | None = None


@dataclass(frozen=True)
class Grid:
    """A table of the page."""

    headings: list[Cell]
    lines: list[Line]


def means(table: Table) -> Grid:
    """Return the table of means, a line for each arm."""
    section = sections.means(table, table.metrics, "\n")
    labels = short_columns(table.columns)
    section = Section(section.title, [*labels, *section.headings[len(labels) :]], section.rows, section.texts)
    return _grid(section, [row.arm for row in table.rows])


def differences(table: Table) -> Grid:
    """Return the table of differences to the baseline, a line for each metric and arm that has one.

    The lines of a metric keep together.
    """
    section = sections.differences(table)
    compared = [(row, metric) for row in table.rows for metric in table.metrics if metric.key in row.differences]
    rows = [[row.arm.name, *cells[1:]] for (row, _), cells in zip(compared, section.rows, strict=True)]
    bars = {metric.key: _bars(table.rows, metric.key) for metric in table.metrics}
    grid = _grid(Section(section.title, section.headings, rows, section.texts), [row.arm for row, _ in compared])
    with_bars = [
        (metric, Line(line.arm, line.cells, bars[metric.key].get(line.arm)))
        for (_, metric), line in zip(compared, grid.lines, strict=True)
    ]
    order: dict[str, int] = {metric.key: place for place, metric in enumerate(table.metrics)}
    with_bars.sort(key=lambda pair: order[pair[0].key])
    return Grid(grid.headings, [line for _, line in with_bars])


def tokens_to_loss(table: Table) -> Grid:
    """Return the table of tokens to a loss, a line for each arm that is compared with the baseline."""
    return _grid(sections.tokens_to_loss(table), [row.arm for row in table.rows if row.tokens_to_loss])


def without_result(table: Table) -> Grid:
    """Return the table of runs without a result; those that began have a link to their folder."""
    section = sections.absent(table)
    lines = []
    for run, status, error, folder in section.rows:
        href = "" if status == "missing" else _href(folder)
        lines.append(Line("", [Cell(run), Cell(status), Cell(error or ABSENT), Cell(folder, href=href)]))
    return Grid([Cell(heading) for heading in section.headings], lines)


def runs(table: Table) -> Grid:
    """Return the table of finished runs, a line for each, with a link to its folder."""
    shown = [("val/ppl", Metric("val/ppl", "perplexity", "{:.3f}", "↓"))]
    shown.append(("tokens_per_second", Metric("tokens_per_second", "tokens/s", "{:,.0f}", "↑")))
    lines = []
    for row in table.rows:
        for run in row.arm.runs:
            values = [(metric, run.value(key)) for key, metric in shown]
            numbers = [ABSENT if value is None else metric.number.format(value) for metric, value in values]
            folder = Cell(run.path.name, href=_href(run.path.name))
            lines.append(
                Line(row.arm.name, [Cell(row.arm.name), _number(str(run.seed)), *map(_number, numbers), folder])
            )
    headings = [Cell("arm"), Cell("seed", number=True), *(Cell(m.heading, number=True) for _, m in shown)]
    return Grid([*headings, Cell("folder")], lines)


def config_differences(arms: Sequence[Arm]) -> list[tuple[str, list[str]]]:
    """Return the dotted keys that differ between these arms, each with its value in every arm."""
    configs = [result_keys(arm.runs[0].spec.written) for arm in arms]
    keys = dict.fromkeys(key for config in configs for key in config if key != "seed")
    told = [(key, [json.dumps(config[key]) if key in config else ABSENT for config in configs]) for key in keys]
    return [(key, values) for key, values in told if len(set(values)) > 1]


def _grid(section: Section, arms: Sequence[Arm]) -> Grid:
    headings = [Cell(text, number=place >= section.texts) for place, text in enumerate(section.headings)]
    lines = [
        Line(arm.name, [*map(Cell, row[: section.texts]), *map(_number, row[section.texts :])])
        for arm, row in zip(arms, section.rows, strict=True)
    ]
    return Grid(headings, lines)


def _number(text: str) -> Cell:
    """Return the cell of a number, which is sorted by its first word: `1,234`, `<0.001`, `+3.5%`."""
    first, *others = text.split("\n")
    try:
        key = float(first.split(" ")[0].strip("<%").replace(",", ""))
    except ValueError:
        return Cell(first, " ".join(others), number=True)
    return Cell(first, " ".join(others), number=True, key=key)


def _bars(rows: Sequence[Row], key: str) -> dict[str, Bar]:
    """Return the bars of a metric by arm; the widest interval fills its bar."""
    found = {row.arm.name: row.differences[key] for row in rows if key in row.differences}
    bounded = {n: (d.low, d.mean, d.high) for n, d in found.items() if d.low is not None and d.high is not None}
    reach = max((max(abs(low), abs(high)) for low, _, high in bounded.values()), default=0)

    def percent(value: float) -> float:
        return round(50 + 48 * value / reach, 2)

    return {
        name: Bar(percent(low), percent(mean), percent(high), low > 0 or high < 0)
        for name, (low, mean, high) in bounded.items()
        if reach
    }


def _href(folder: str) -> str:
    """Return a link relative to the page, which lies beside the folder."""
    return f"./{quote(folder)}/"
