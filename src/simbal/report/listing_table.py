"""Draws a list of runs, with fewer columns where the terminal is narrow."""

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from simbal.console import clock, new_grid

STYLES = {
    "running": "cyan", "finished": "green", "unfinished": "yellow", "killed": "yellow", "pruned": "yellow",
}  # fmt: skip
UNUSUAL = "bold red"  # failed, diverged, damaged
HEADINGS = ("arm", "folder", "seed", "status", "step", "loss", "ppl", "when", "took", "size")
NARROW = ("folder", "status", "step", "loss", "ppl")  # in a terminal of fewer than 100 columns
TEXTS = ("arm", "folder", "status")
Run = Mapping[str, Any]  # the values of a run


def show(runs: Sequence[Run], more: int, out: Console) -> None:
    """Print the table of these runs, how many `more` there are, and below it why some of them have no result."""
    top = os.path.commonpath([Path(run["folder"]).absolute().parent for run in runs])
    grid, errors = new_grid(f"runs in {os.path.relpath(top)}"), new_grid("without a result")
    headings = HEADINGS if out.width >= 100 else NARROW
    for heading in headings:
        left = heading in TEXTS
        grid.add_column(heading, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    for heading in ("folder", "status", "why"):
        errors.add_column(heading, overflow="fold")
    for run in runs:
        cells = _cells(run, top)
        grid.add_row(*(cells[heading] for heading in headings))
        if run["error"]:
            errors.add_row(cells["folder"], cells["status"], run["error"])
    out.print(grid)
    if more:
        out.print(f"and {more} more")
    if errors.rows:
        out.print(errors)


def _cells(run: Run, top: str) -> dict[str, Text | str]:
    """Return the text below each heading."""

    def text(key: str, shown: Callable[[Any], str] = str) -> str:
        return "" if run.get(key) is None else shown(run[key])

    return {
        "arm": text("arm"),
        "folder": os.path.relpath(run["folder"], top),
        "seed": text("seed"),
        "status": Text(run["status"], STYLES.get(run["status"], UNUSUAL)),
        "step": f"{'?' if run['step'] is None else run['step']}/{run['steps']}" if run["steps"] else "",
        "loss": text("val/loss", "{:.4f}".format),
        "ppl": text("val/ppl", "{:.2f}".format),
        "when": f"{datetime.fromisoformat(run['when']).astimezone():%Y-%m-%d %H:%M}",
        "took": text("seconds", clock),
        "size": decimal(run["size"]),
    }
