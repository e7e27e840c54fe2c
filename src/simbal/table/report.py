"""From a folder of runs to the table on the screen and in the folder; used by report.py and at the end of a sweep."""

from collections.abc import Sequence
from pathlib import Path

from simbal.console import console
from simbal.table import export, terminal
from simbal.table.collect import collect
from simbal.table.metric import choose, own_columns
from simbal.table.missing import never_started
from simbal.table.table import build


def report(
    folder: Path, baseline: str | None = None, columns: Sequence[str] | None = None, paper: bool = False
) -> None:
    """Print the table of the runs in `folder` and write table.md, .tex, .csv, .json and index.html there.

    Args:
        folder: outputs/<name>.
        baseline: the balancing to compare with; None takes the one that the runs' own configs name.
        columns: names of numbers of the runs or of their analyses; None takes those that the runs' own configs name, or
            the usual ones.
        paper: set what the paper reports of the same strategies beside each number.

    Raises:
        UserError: as `collect`, `choose`, `never_started` and `build` do.
    """
    runs = collect(folder)
    finished = [run for run in runs if run.finished]
    chosen = own_columns(finished) if columns is None else columns
    metrics = None if chosen is None else choose(chosen, finished)
    missing = never_started(folder, {run.path.name for run in runs})
    table = build(folder.resolve().name, runs, baseline, metrics, paper, missing)
    out = console()
    terminal.show(table, out)
    export.export(table, folder)
    from simbal.page import page  # matplotlib takes a third of a second to import

    page.write(table, folder)
    out.print(f"written: {folder / 'table.md'}, table.tex, table.csv, table.json and index.html", soft_wrap=True)
