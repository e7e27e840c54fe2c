"""The console and the layout of all printed tables."""

import sys

from rich import box
from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 120  # columns, if the output is a file or a pipe


def console() -> Console:
    """Return the console of standard output, as wide as the terminal or else `PLAIN_WIDTH`."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False, emoji=False, markup=False)


def new_grid(title: str, *headings: str) -> Table:
    """Return an empty table with a title and columns: the first is left-justified, the others right-justified."""
    grid = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for number, heading in enumerate(headings):
        grid.add_column(heading, justify="right" if number else "left")
    return grid


def clock(seconds: float) -> str:
    """Format a duration as `2:05` or `1:02:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
