"""Draws a list of runs, with fewer columns where the terminal is narrow."""

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from simbal.files.console import clock, new_grid

STYLES = {
    "running": "cyan", "finished": "green", "unfinished": "yellow", "killed": "yellow", "pruned": "yellow",
    "foreign": "dim",
}  # fmt: skip
UNUSUAL = "bold red"  # failed, diverged, damaged
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
HEADINGS = ("arm", "folder", "seed", "status", "step", "loss", "ppl", "when", "took", "size")
NARROW = ("folder", "status", "step", "loss", "ppl")  # where the terminal is too narrow for all
TEXTS = ("arm", "folder", "status")
Run = Mapping[str, Any]  # the values of a listed folder


def show(runs: Sequence[Run], more: int, out: Console) -> None:
    """Print the table of these runs, how many `more` there are, and below it why some of them have no result."""
    top = common_folder([Path(run["folder"]) for run in runs])
    title = f"runs in {top}" if top else "runs"
    grid = _grid(title, HEADINGS, runs, top)
    if _width(grid, out) > out.width:
        grid = _grid(title, NARROW, runs, top)
    out.print(grid)
    if more:
        out.print(f"and {more} more")
    if said := [run for run in runs if run["error"]]:
        out.print(_errors(said, top))


def common_folder(paths: Sequence[Path]) -> Path | None:
    """Return the folder that all paths lie in; None if there is none but the root, or there are no paths."""
    try:
        common = Path(os.path.commonpath([path.parent for path in paths]))
    except ValueError:  # no paths, or relative and absolute ones
        return None
    return common if common.parts and common != Path(common.anchor) else None


def in_bytes(count: float) -> str:
    """Return a size with three digits or so, such as `3.4 MiB`."""
    unit = 0
    while count >= 1000 and unit < len(UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.1f} {UNITS[unit]}" if unit and count < 100 else f"{count:.0f} {UNITS[unit]}"


def _cells(run: Run, top: Path | None) -> dict[str, str]:
    """Return what stands under each heading."""
    folder = Path(run["folder"])
    cells = {
        "arm": run["arm"] or "",
        "folder": str(folder.relative_to(top) if top else folder),
        "seed": _said(run["seed"]),
        "status": run["status"],
        "step": _steps(run),
        "loss": _said(run.get("val/loss"), "{:.4f}".format),
        "ppl": _said(run.get("val/ppl"), "{:.2f}".format),
        "when": _said(run["when"], _local),
        "took": _said(run["seconds"], clock),
        "size": in_bytes(run["size"]),
    }
    return {heading: text.replace("\n", " ") for heading, text in cells.items()}


def _steps(run: Run) -> str:
    if run["steps"] is None:
        return ""
    return f"{'?' if run['step'] is None else run['step']}/{run['steps']}"


def _said(value: Any, shown: Callable[[Any], str] = str) -> str:
    return "" if value is None else shown(value)


def _local(when: str) -> str:
    """Return a time as this machine's clock has it, to the minute, or its day if it is of another year."""
    try:
        time = datetime.fromisoformat(when).astimezone()
        return time.strftime("%m-%d %H:%M" if time.year == datetime.now().year else "%Y-%m-%d")
    except (ValueError, OverflowError):
        return when[:16]


def _style(run: Run) -> str:
    return STYLES.get(run["status"], UNUSUAL)


def _grid(title: str, headings: Sequence[str], runs: Sequence[Run], top: Path | None) -> Table:
    grid = new_grid(title)
    for heading in headings:
        left = heading in TEXTS
        grid.add_column(heading, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    for run in runs:
        cells = _cells(run, top)
        texts = {heading: Text(cells[heading]) for heading in headings}
        texts["status"].stylize(_style(run))
        grid.add_row(*texts.values())
    return grid


def _width(grid: Table, out: Console) -> int:
    return out.measure(grid, options=out.options.update(max_width=10_000)).maximum


def _errors(runs: Sequence[Run], top: Path | None) -> Table:
    grid = new_grid("without a result")
    for heading in ("folder", "status", "why"):
        grid.add_column(heading, overflow="fold")
    for run in runs:
        cells = _cells(run, top)
        grid.add_row(cells["folder"], Text(cells["status"], _style(run)), run["error"].replace("\n", " "))
    return grid
