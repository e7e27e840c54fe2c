"""A table on the terminal, as much of it as fits; the means come last, where one looks when a sweep has ended."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from simbal.commands import format_command
from simbal.files.console import new_grid
from simbal.report import sections
from simbal.report.columns import Cell
from simbal.report.notes import explanations, remarks
from simbal.report.sections import Section
from simbal.report.table import Table

# columns of differences and of tokens to a loss that a narrow terminal does without, the first first
SPARE = ("Welch p", "d_z", "p", "detectable", "tokens needed", "seeds", "over documents", "pairs")
TEXT_WIDTHS = (None, 24, 16)  # tried in turn for columns of text; None: any
NARROWEST = 12  # where not even the last part fits
MOST_ARMS, MOST_ABSENT = 100, 100  # rows that somebody reads; drawing one takes a millisecond
Part = tuple[list[str], Section]  # a section, and the headings that it is without


def show(table: Table, out: Console, explain: bool = False, in_files: bool = True) -> None:
    """Print what is particular to the table, differences, tokens saved, runs without a result, and at last the means.

    With `explain`, how the numbers are defined and compared comes first; `in_files`: whether all of it is in files too.
    """
    for note in [*(explanations(table) if explain else []), *remarks(table)]:
        out.print(note, style="dim")
    out.print()
    table, whole = table.of_best(MOST_ARMS), table
    left_out = []
    for section in (sections.differences(table), sections.tokens_to_loss(table)):
        if section.rows:
            left_out += show_fitting(_without_spare(section), out)
    if (absent := sections.absent(table)).rows:
        out.print(Layout(replace(absent, rows=absent.rows[:MOST_ABSENT])).grid())
        if more := len(absent.rows[MOST_ABSENT:]):
            out.print(f"and {more:,} more runs without a result")
    if table.rows or table.models:
        left_out += show_fitting(_means(table), out)
    if any(cell.muted for row in sections.means(table).rows for cell in row):
        out.print(f"Faint: the difference to {table.baseline} is not resolved.", style="dim")
    if len(table.rows) < len(whole.rows):
        said = f"{len(table.rows)} of {len(whole.rows):,} arms stand here, those of the lowest validation loss"
        out.print(f"{said}{'; the files have all' * in_files}.", style="dim")
    if left_out:
        has = "the files have all" if in_files else "a wider terminal has all"
        out.print(f"Left out at this width: {', '.join(left_out)}; {has}.", style="dim")
    if not explain:
        where = f"{'in the files, or ' * in_files}printed by report.py with explain=true"
        out.print(format_command(f"What the numbers mean: {where}."), style="dim")


def show_fitting(parts: Iterable[Part], out: Console) -> list[str]:
    """Print the first of ever narrower parts in the first layout that fits, or the last; return what it is without."""
    for without, section in parts:
        for layout in _layouts(section):
            if layout.fits(out):
                out.print(layout.grid())
                return without
    out.print(replace(layout, text_width=NARROWEST).grid())
    return without


def _without_spare(section: Section) -> Iterator[Part]:
    spare = [heading for heading in SPARE if heading in section.headings]
    for count in range(len(spare) + 1):
        yield spare[:count], section.select([heading for heading in section.headings if heading not in spare[:count]])


def _means(table: Table) -> Iterator[Part]:
    """Yield the means of all metrics, then of ever fewer."""
    for count in range(max(1, len(table.metrics)), 0, -1):
        without = [metric.title for metric in table.metrics[count:]]
        yield without, sections.means(replace(table, metrics=table.metrics[:count]), short=True)


@dataclass(frozen=True)
class Layout:
    """A section to be drawn with a greatest width of its columns of text, or with cells on two lines."""

    section: Section
    text_width: int | None = None
    two_lines: bool = False

    def fits(self, out: Console) -> bool:
        """Whether no line needs a break; only the widest cell of each column is measured."""
        widest = [max(cells, key=self._width) for cells in zip(*self.section.rows, strict=True)]
        grid = replace(self, section=replace(self.section, rows=[widest])).grid()
        return out.measure(grid, options=out.options.update(max_width=10_000)).maximum <= out.width

    def grid(self) -> Grid:
        """Return the table that is printed; columns that are still too wide are folded, never cut."""
        grid = new_grid(self.section.title)
        for i, heading in enumerate(self.section.headings):
            if i < self.section.texts:
                grid.add_column(heading, overflow="fold", max_width=None if heading == "metric" else self.text_width)
            else:
                grid.add_column(heading, justify="right", overflow="fold")
        for row in self.section.rows:
            grid.add_row(*(Text(self._text(cell), "dim" if cell.muted else "") for cell in row))
        return grid

    def _text(self, cell: Cell) -> str:
        return cell.lines if self.two_lines else cell.line

    def _width(self, cell: Cell) -> int:
        return max(map(cell_len, self._text(cell).split("\n")))


def _layouts(section: Section) -> Iterator[Layout]:
    """Yield layouts: one line to a heading and a cell, two to a heading, two to a cell; then columns of text folded."""
    short = replace(section, headings=[*map(_two_lines, section.headings)])
    for width in TEXT_WIDTHS:
        for drawn, two_lines in ((section, False), (short, False), (short, True)):
            yield Layout(drawn, width, two_lines)


def _two_lines(title: str) -> str:
    """Break a title where its halves are most alike in length; an arrow stays with its word."""
    words, arrow = (title[:-2], title[-2:]) if title.endswith((" ↓", " ↑")) else (title, "")
    breaks = [place for place, letter in enumerate(words) if letter == " "]
    middle = min(breaks, key=lambda place: abs(2 * place - len(words)), default=len(words))
    return f"{words[:middle]}\n{words[middle + 1 :]}".rstrip() + arrow
