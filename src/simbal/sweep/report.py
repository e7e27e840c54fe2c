"""From a folder of runs to the table on the screen and in the folder; used by report.py and at the end of a sweep."""

from collections.abc import Sequence
from pathlib import Path

from simbal.console import console
from simbal.sweep import export, terminal
from simbal.sweep.collect import collect
from simbal.sweep.metric import METRICS, choose
from simbal.sweep.paper import paper_grid
from simbal.sweep.table import build


def report(
    folder: Path, baseline: str | None = None, columns: Sequence[str] | None = None, paper: bool = False
) -> None:
    """Print the table of the runs in `folder` and write table.md, table.csv and table.json there.

    Args:
        folder: outputs/<name>.
        baseline: the balancing to compare with; None takes the one that the runs' own configs name.
        columns: names of numbers of the runs or of their analyses; None: the usual ones.
        paper: print what the paper reports of the same strategies, too.

    Raises:
        UserError: as `collect` and `choose` do.
    """
    runs = collect(folder)
    metrics = METRICS if columns is None else choose(columns, [run for run in runs if run.finished])
    table = build(folder.resolve().name, runs, baseline, metrics)
    out = console()
    terminal.show(table, out)
    if paper and (grid := paper_grid(table)):
        out.print(grid)
    export.export(table, folder)
    out.print(f"written: {folder / 'table.md'}, table.csv and table.json", soft_wrap=True)
