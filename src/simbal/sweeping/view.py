"""The view of a sweep: a live table on a terminal, one line per change elsewhere, and the forecast of a dry run."""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from simbal.console import clock, new_grid
from simbal.runs.record import read_progress
from simbal.runs.spec import RunSpec, config_hash
from simbal.sweeping.checks import finished_runs
from simbal.sweeping.plan import Attempt, State

# most urgent first: a small terminal shows only the most urgent attempts
STYLES: dict[State, str] = {
    "running": "cyan", "failed": "bold red", "locked": "cyan dim", "queued": "dim", "pruned": "yellow", "done": "green",
}  # fmt: skip
REDUNDANT = re.compile(r"(?<!\S)(balancing=|[\w.]+\.(?=\w+=))")  # `balancing=` and `balancing.simbal.` in a label
FRAME_LINES = 6  # heading, rule, summary and the shell's own lines
REFRESH_SECONDS = 0.5  # drawing takes CPU time from the jobs


class View:
    """Show the attempts of a pool while it runs, as a context manager."""

    def __init__(self, attempts: Sequence[Attempt], slots: int, console: Console) -> None:
        self.attempts, self.slots, self.console = attempts, slots, console
        self.numbers = {id(attempt): number for number, attempt in enumerate(attempts, 1)}
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self.drawn = 0.0

    def __enter__(self) -> "View":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self._draw(self.live)
            self.live.stop()

    def print_change(self, attempt: Attempt) -> None:
        """Print the new state of an attempt, unless the live table shows it."""
        if self.live:
            return
        number = f"[{self.numbers[id(attempt)]}/{len(self.attempts)}]"
        duration = f" in {clock(attempt.seconds)}" if attempt.started else ""
        detail = {"done": duration, "failed": f": {attempt.error}"}.get(attempt.state, "")
        self.console.print(f"{number} {attempt.state:<7} {attempt.label}{detail}", soft_wrap=True)

    def print_interruption(self) -> None:
        """Print the progress of an interrupted sweep after its jobs have ended."""
        counts = Counter(attempt.state for attempt in self.attempts)
        progress = [read_progress(attempt.folder.path) for attempt in self.attempts if attempt.state == "running"]
        steps = ", ".join(f"step {row['step']}" for row in progress if "step" in row)
        stopped = f"{len(progress)} interrupted" + (f" (about {steps})" if steps else "")
        self.console.print(
            f"stopped: {counts['done']} done, {stopped}, {counts['queued']} not started. Rerun the command to resume.",
            soft_wrap=True,
        )

    def refresh(self) -> None:
        """Update the live table."""
        if self.live and time.monotonic() - self.drawn >= REFRESH_SECONDS:
            self._draw(self.live)

    def _draw(self, live: Live) -> None:
        live.update(draw(self.attempts, self.slots, self.console.height), refresh=True)
        self.drawn = time.monotonic()


def draw(attempts: Sequence[Attempt], slots: int, height: int) -> Table:
    """Return the live table, with only the most urgent attempts if `height` lines are too few for all."""
    urgency = {state: place for place, state in enumerate(STYLES)}
    by_urgency = sorted(range(len(attempts)), key=lambda number: urgency[attempts[number].state])
    shown = [attempts[number] for number in sorted(by_urgency[: max(1, height - FRAME_LINES)])]
    running = [attempt for attempt in attempts if attempt.state == "running"]
    progress = {id(a): read_progress(a.folder.path) for a in [*running, *(a for a in shown if a.state == "done")]}
    counts = Counter(attempt.state for attempt in attempts)
    states: tuple[State, ...] = ("running", "queued", "done", "failed", "locked", "pruned")
    parts = [f"{counts[state]} {state}" for state in states if counts[state]]
    left = seconds_left(attempts, progress, slots)
    caption = ", ".join(parts) + (f"; about {clock(left)} left" if left else "")
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=caption, caption_justify="left")
    grid.caption_style = ""
    grid.add_column("run")
    grid.add_column("state", max_width=40)  # the table of results shows errors in full
    for heading in ("step", "loss", "tokens/s", "time", "left"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for attempt in shown:
        grid.add_row(*_cells(attempt, progress.get(id(attempt), {})), style=STYLES[attempt.state])
    if more := len(attempts) - len(shown):
        grid.add_row(f"and {more} more", style="dim")
    return grid


def seconds_left(attempts: Sequence[Attempt], progress: dict[int, dict[str, Any]], slots: int) -> float | None:
    """Return the estimated seconds until the last job ends, or None if no job has a known length.

    A queued job is assumed to take as long as the mean of the jobs with a known length.
    """
    running = [attempt for attempt in attempts if attempt.state == "running"]
    remaining = {id(a): progress[id(a)].get("seconds_left") for a in running}
    lengths = [attempt.seconds for attempt in attempts if attempt.state == "done" and attempt.started]
    lengths += [a.seconds + left for a in running if (left := remaining[id(a)]) is not None]
    if not lengths:
        return None
    mean = fmean(lengths)
    known = [max(0.0, mean - a.seconds) if (left := remaining[id(a)]) is None else float(left) for a in running]
    queued = sum(attempt.state == "queued" for attempt in attempts)
    return max([*known, (sum(known) + queued * mean) / slots])


def forecast(attempts: Sequence[Attempt], slots: int) -> tuple[Table, str]:
    """Return a table of all runs, and sentences with the expected time and disk of the missing runs in `slots` slots.

    The time comes from the finished runs of the same folder or, without any, from the rates of analysis=plan.
    """
    from simbal.analysis.plan import estimate  # imports torch

    lengths = _finished_seconds(attempts)
    of_all_arms = [*chain.from_iterable(lengths.values())]
    grid = new_grid("dry run: nothing is started")
    for heading in ("run", "state", "folder"):
        grid.add_column(heading, overflow="fold")
    grid.add_column("expected", justify="right")
    expected: list[float] = []
    queued = [attempt for attempt in attempts if attempt.state == "queued"]
    one_of_each = {_arm(attempt.job.spec): attempt.job.spec for attempt in queued}
    estimates = {arm: estimate(spec) for arm, spec in one_of_each.items()}
    for attempt in attempts:
        cell = ""
        if attempt.state == "queued":
            cell = "?"
            of_arm = lengths.get(_arm(attempt.job.spec), of_all_arms)
            whole = fmean(of_arm) if of_arm else estimates[_arm(attempt.job.spec)].seconds
            if whole is not None:
                progress = read_progress(attempt.folder.path) if attempt.kind == "resumed" else {}
                expected.append(whole * (1 - progress.get("step", 0) / progress.get("max_steps", 1)))
                cell = clock(expected[-1])
        grid.add_row(attempt.label, attempt.kind, attempt.folder.path.name, cell)
    if not queued:
        return grid, "All runs are finished."
    every = [estimates[_arm(attempt.job.spec)] for attempt in queued]
    text = f"{len(queued)} to run, {slots} at once"
    if len(expected) < len(queued):
        text += ". Their time is unknown until a run is finished."
    else:
        total = max(sum(expected) / slots, *expected)
        basis = f"an estimate from the rate of {every[0].processor} (analysis=plan)"
        if of_all_arms:
            basis = "estimated from finished runs"
        text += f": about {clock(total)}, {sum(expected) / 3600:,.2f} hours of training, {basis}."
    final = decimal(sum(each.final_bytes for each in every))
    saved = decimal(sum(sorted(each.checkpoint_bytes for each in every)[-slots:]))
    return grid, f"{text}\nDisk: {final} for the final weights, and up to {saved} for checkpoints during training."


def _cells(attempt: Attempt, progress: dict[str, Any]) -> list[Text]:
    state = str(progress.get("phase", attempt.state))
    if attempt.state == "done":
        progress, state = progress | {"seconds_left": None}, "done"
    if attempt.state == "failed":
        state = f"failed: {attempt.error}"
    loss, speed, left = (progress.get(key) for key in ("loss", "tokens_per_second", "seconds_left"))
    cells = [
        REDUNDANT.sub("", attempt.label),
        state,
        f"{progress['step']}/{progress['max_steps']}" if "step" in progress else "",
        "" if loss is None else f"{loss:.3f}",
        "" if speed is None else f"{speed:,.0f}",
        clock(attempt.seconds) if attempt.started else "",
        "" if left is None else clock(left),
    ]
    # a narrow terminal truncates the label and the state, because the other columns have no_wrap
    return [Text(cell, no_wrap=True, overflow="ellipsis") for cell in cells]


def _finished_seconds(attempts: Sequence[Attempt]) -> dict[str, list[float]]:
    """Return the running times of all finished runs in the folders of the attempts, by arm."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for folder in {attempt.folder.path.parent for attempt in attempts}:
        for run in finished_runs(folder):
            seconds[_arm(run.spec)].append(run.result["seconds"])
    return seconds


def _arm(spec: RunSpec) -> str:
    return config_hash({key: value for key, value in spec.written.items() if key != "seed"})
