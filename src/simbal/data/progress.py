"""The live view of a store being built: documents, tokens, MB/s and time left, on stderr."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Report(Protocol):
    """How a build says where it is."""

    def __call__(self, done: float, documents: int, tokens: int, text_bytes: int) -> None:
        """`done` is a share of the input, 0 to 1; the others are totals so far."""


@contextmanager
def build_progress(visible: bool) -> Iterator[Report]:
    """A bar that lives as long as the block, and calls that do nothing if it is not `visible`."""
    counts = "{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens, {task.fields[speed]:.1f} MB/s"
    columns = (TextColumn("preparing"), BarColumn(), TextColumn(counts), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not visible) as bar:
        task = bar.add_task("", total=1.0, documents=0, tokens=0, speed=0.0)

        def report(done: float, documents: int, tokens: int, text_bytes: int) -> None:
            speed = text_bytes / 1e6 / (bar.tasks[0].elapsed or 1.0)
            bar.update(task, completed=done, documents=documents, tokens=tokens, speed=speed)

        yield report
