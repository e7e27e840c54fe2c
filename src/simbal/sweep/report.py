"""From a folder of runs to the table on the screen and in the folder; used by report.py and at the end of a sweep."""

from pathlib import Path

from simbal.console import console
from simbal.sweep import export, terminal
from simbal.sweep.collect import collect
from simbal.sweep.table import build


def report(folder: Path, baseline: str | None = None) -> None:
    """Print the table of the runs in `folder` and write table.md, table.csv and table.json there.

    Args:
        folder: outputs/<name>.
        baseline: the balancing to compare with; None takes the one that the runs' own configs name.

    Raises:
        UserError: as `collect` does.
    """
    runs = collect(folder)
    table = build(folder.resolve().name, runs, baseline)
    out = console()
    terminal.show(table, out)
    export.export(table, folder)
    out.print(f"written: {folder / 'table.md'}, table.csv and table.json", soft_wrap=True)
