"""Reports on a folder of runs: collects, compares, prints the table to fit the terminal, and writes it to the folder.

It is what report.py does, and the end of a sweep.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid

from simbal.errors import UserError
from simbal.files.console import console, new_grid
from simbal.report import export, sections
from simbal.report.collect import Run, collect
from simbal.report.columns import Cell, choose, named_by_runs
from simbal.report.notes import notes
from simbal.report.power import power_section
from simbal.report.sections import Section
from simbal.report.table import LastSweep, Table, build
from simbal.runs.record import is_number

KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "baseline": (lambda value: isinstance(value, str), "the balancing or the arm that differences are taken from"),
    "compare": (lambda value: value == "all", "all, for every two arms"),
    "columns": (lambda value: isinstance(value, list), "a list such as [ppl,min_pes]"),
    "paper": (lambda value: isinstance(value, bool), "true or false"),
    "power": (lambda value: isinstance(value, bool), "true or false"),
    "equivalence_margin": (lambda value: is_number(value) and value > 0, "a number above 0, in nats per token"),
}
TEXT_WIDTHS = (None, 24, 12)  # tried in turn for the column that names an arm; None: any
TESTS, CONCLUSION = ("p", "p (Holm)", "d_z", "Welch p"), ("conclusion", "detectable")
SPLITS = ((), (TESTS,), ((*CONCLUSION, *TESTS),), (CONCLUSION, TESTS))  # tried in turn: the columns of further tables


def report(
    folder: Path,
    baseline: str | None = None,
    columns: Sequence[str] | None = None,
    paper: bool = False,
    equivalence_margin: float | None = None,
    compare: str | None = None,
    power: bool = False,
) -> None:
    """Print the table of the runs in `folder` and write table.md, .tex, .csv, .json and index.html there.

    Args:
        folder: outputs/<name>.
        baseline: the balancing or the arm to compare with; None takes the one that the runs' own configs name.
        columns: names of numbers of the runs or of their analyses; None takes those that the runs' own configs name, or
            the usual ones.
        paper: set what the paper reports of the same strategies beside each number.
        equivalence_margin: nats per token; None takes the one that the runs' own configs name.
        compare: `all` compares every two arms.
        power: also print how many more seeds would decide each comparison; it stands in no file.

    Raises:
        UserError: as `collect`, `choose`, `LastSweep.of` and `build` do, and for a baseline that no arm is.
    """
    runs = collect(folder)
    finished = [run for run in runs if run.finished]
    chosen = named_by_runs(finished) if columns is None else columns
    metrics = None if chosen is None else choose(chosen, finished)
    missing = LastSweep.of(folder).never_started({run.path.name for run in runs})
    table = build(folder.resolve().name, runs, baseline, metrics, paper, missing, equivalence_margin, compare == "all")
    _check_baseline(table, runs)
    out = console()
    show(table, out)
    if power:
        _show_fitting(power_section(table), out)
    export.export(table, folder)
    from simbal.report.page import page  # matplotlib takes a third of a second to import

    page.write(table, folder)
    out.print(f"written: {folder / 'table.md'}, table.tex, table.csv, table.json and index.html", soft_wrap=True)


def report_keys(lines: Sequence[str]) -> dict[str, Any]:
    """Return the values of `key=value` lines by key; `UserError` for an unknown key or a value of another kind."""
    keys: dict[str, Any] = {}
    for line in lines:
        key, equals, text = line.partition("=")
        if not equals or key not in KINDS:
            raise UserError(f"{line}: give {', '.join(f'{name}=' for name in KINDS)}")
        allowed, meaning = KINDS[key]
        try:
            keys[key] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError):  # also for a number that Python does not read
            keys[key] = None
        if not allowed(keys[key]):
            raise UserError(f"{line}: {key} must be {meaning}")
    return keys


def _check_baseline(table: Table, runs: Sequence[Run]) -> None:
    """Raise `UserError` unless the baseline is an arm's balancing or name, or what the configs of the runs say."""
    known = [row.arm.name for row in table.rows] + [run.spec.choices["balancing"] for run in runs]
    if table.baseline is not None and table.baseline not in (*known, *(run.spec.config.baseline for run in runs)):
        nearest = get_close_matches(table.baseline, dict.fromkeys(known), 3, 0)
        raise UserError(f"baseline={table.baseline}: no arm is that; there is {', '.join(nearest)}")


def show(table: Table, out: Console) -> None:
    """Print the means, the differences to the baseline, the tokens saved, the runs without a result, and the notes."""
    if table.rows:
        _show_means(table, out)
    for section in (sections.differences(table), sections.tokens_to_loss(table)):
        if section.rows:
            _show_fitting(section, out)
    if (absent := sections.absent(table)).rows:
        out.print(Layout(absent).grid())
    for note in notes(table):
        out.print(note, style="dim")


@dataclass(frozen=True)
class Layout:
    """A section to be drawn with greatest widths of its first and its other columns of text, or cells on two lines."""

    section: Section
    first_width: int | None = None
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
                grid.add_column(heading, overflow="fold", max_width=self.text_width if i else self.first_width)
            else:
                grid.add_column(heading, justify="right", overflow="fold")
        for row in self.section.rows:
            grid.add_row(*map(self._text, row))
        return grid

    def _text(self, cell: Cell) -> str:
        return cell.lines if self.two_lines else cell.line

    def _width(self, cell: Cell) -> int:
        return max(map(cell_len, self._text(cell).split("\n")))


def _show_means(table: Table, out: Console) -> None:
    """Print the means: one line to a cell if that fits, else two, else half of the metrics at a time."""
    section = sections.means(table, short=True)
    labels = len(table.columns)
    headings = [*section.headings[:labels], *map(_two_lines, section.headings[labels:])]
    short = replace(section, headings=headings)
    for layout in (Layout(section), Layout(short, two_lines=True), Layout(short, 16, 16, two_lines=True)):
        if layout.fits(out):
            break
    else:
        if len(table.metrics) > 1:
            half = (len(table.metrics) + 1) // 2
            _show_means(replace(table, metrics=table.metrics[:half]), out)
            _show_means(replace(table, metrics=table.metrics[half:]), out)
            return
    out.print(layout.grid())


def _show_fitting(section: Section, out: Console) -> None:
    """Print a section in the first layout that fits, or in the narrowest."""
    for layouts in _layouts(section):
        if all(layout.fits(out) for layout in layouts):
            break
    out.print(*(layout.grid() for layout in layouts), sep="\n")


def _layouts(section: Section) -> Iterator[list[Layout]]:
    """Yield layouts: one line to a heading and a cell, two to a heading, two to a cell; then some apart."""
    for parts in [_split(section, *moved) for moved in SPLITS] if "p" in section.headings else [[section]]:
        short = [replace(part, headings=[*map(_two_lines, part.headings)]) for part in parts]
        for drawn, two_lines in ((parts, False), (short, False), (short, True)):
            for width in TEXT_WIDTHS:
                yield [Layout(part, width, two_lines=two_lines) for part in drawn]
    yield [Layout(part, TEXT_WIDTHS[-1], TEXT_WIDTHS[-1], two_lines=True) for part in short]


def _split(section: Section, *moved: Sequence[str]) -> list[Section]:
    """Return the section without the columns that are moved, and one of each group of them."""
    kept = [heading for heading in section.headings if not any(heading in group for group in moved)]
    return [section.select(headings) for headings in (kept, *moved)]


def _two_lines(title: str) -> str:
    """Break a title where its halves are most alike in length; an arrow stays with its word."""
    words, arrow = (title[:-2], title[-2:]) if title.endswith((" ↓", " ↑")) else (title, "")
    breaks = [place for place, letter in enumerate(words) if letter == " "]
    middle = min(breaks, key=lambda place: abs(2 * place - len(words)), default=len(words))
    return f"{words[:middle]}\n{words[middle + 1 :]}".rstrip() + arrow
