"""Prints a table for people: no number is ever cut short, however narrow the terminal."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid

from simbal.console import new_grid
from simbal.table import sections
from simbal.table.arms import seed_spans, short_columns
from simbal.table.metric import Metric
from simbal.table.sections import DIFFERENCE_HEADINGS, Section, absence, difference_cells
from simbal.table.table import Table

__all__ = ["DIFFERENCE_HEADINGS", "absence", "difference_cells", "seed_spans", "show"]
TEXT_WIDTHS = (None, 24, 12)  # of the column that names an arm
INTERVAL = re.compile(r"^(\S+) to (\S+)$")
TESTS = ("p", "p (Holm)", "d_z", "Welch p")


@dataclass(frozen=True)
class Layout:
    """A section to be drawn with these greatest widths of its first column and of its other columns of text."""

    section: Section
    first_width: int | None = None
    text_width: int | None = None

    def fits(self, out: Console) -> bool:
        """Whether no line needs a break; only the widest cell of each column is measured."""
        widest = [max(cells, key=_width) for cells in zip(*self.section.rows, strict=True)]
        grid = replace(self, section=replace(self.section, rows=[widest])).grid()
        return out.measure(grid, options=out.options.update(max_width=10_000)).maximum <= out.width

    def grid(self) -> Grid:
        """What is printed; columns that are still too wide are folded, never cut."""
        grid = new_grid(self.section.title)
        for i, heading in enumerate(self.section.headings):
            if i < self.section.texts:
                grid.add_column(heading, overflow="fold", max_width=self.text_width if i else self.first_width)
            else:
                grid.add_column(heading, justify="right", overflow="fold")
        for row in self.section.rows:
            grid.add_row(*row)
        return grid


def show(table: Table, out: Console) -> None:
    """Print the means, the differences to the baseline, the tokens saved, the runs that are missing, and the notes."""
    if table.rows:
        _show_means(table, table.metrics, out)
    for section in (sections.differences(table), sections.tokens_to_loss(table)):
        if section.rows:
            _show_fitting(section, out)
    if (absent := sections.absent(table)).rows:
        out.print(Layout(absent).grid())
    for note in table.notes:
        out.print(note, style="dim")


def _show_means(table: Table, metrics: Sequence[Metric], out: Console) -> None:
    """One line to a cell if that fits, else two, else half of the metrics at a time."""
    for separator, width in ((" ", None), ("\n", None), ("\n", 16)):
        section = sections.means(table, metrics, separator)
        labels = short_columns(table.columns)
        headings = [*labels, *section.headings[len(labels) :]]
        if separator == "\n":
            headings = [*labels, *map(_two_lines, section.headings[len(labels) :])]
        layout = Layout(replace(section, headings=headings), width, width)
        if layout.fits(out) or (len(metrics) == 1 and width):
            out.print(layout.grid())
            return
    half = (len(metrics) + 1) // 2
    _show_means(table, metrics[:half], out)
    _show_means(table, metrics[half:], out)


def _show_fitting(section: Section, out: Console) -> None:
    """The first layout that fits, or the narrowest."""
    for layouts in _layouts(section):
        if all(layout.fits(out) for layout in layouts):
            break
    out.print(*(layout.grid() for layout in layouts), sep="\n")


def _layouts(section: Section) -> Iterator[list[Layout]]:
    """One line to a heading and to a cell, then two to a heading, then two to a cell; then the tests apart."""
    tests = [heading for heading in section.headings if heading in TESTS]
    others = [heading for heading in section.headings if heading not in TESTS]
    for parts in ([section], [section.select(others), section.select(tests)] if tests else [section]):
        short = [replace(part, headings=[*map(_two_lines, part.headings)]) for part in parts]
        shortest = [replace(part, rows=[[*map(_two_line_interval, row)] for row in part.rows]) for part in short]
        for drawn in (parts, short, shortest):
            for width in TEXT_WIDTHS:
                yield [Layout(part, width) for part in drawn]
    yield [Layout(part, TEXT_WIDTHS[-1], TEXT_WIDTHS[-1]) for part in shortest]


def _two_line_interval(cell: str) -> str:
    return INTERVAL.sub("\\1 to\n\\2", cell)


def _two_lines(title: str) -> str:
    """A title of several words, broken where its halves are most alike in length; an arrow stays with its word."""
    words, arrow = (title[:-2], title[-2:]) if title.endswith((" ↓", " ↑")) else (title, "")
    breaks = [place for place, letter in enumerate(words) if letter == " "]
    middle = min(breaks, key=lambda place: abs(2 * place - len(words)), default=len(words))
    return f"{words[:middle]}\n{words[middle + 1 :]}".rstrip() + arrow


def _width(cell: str) -> int:
    return max(map(cell_len, cell.split("\n")))
