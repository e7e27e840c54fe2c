"""The view of a sweep: a live table on a terminal, one line per change in other output, the forecast of a dry run."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from simbal.console import clock, new_grid
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec, config_hash
from simbal.sweep.attempt import Attempt, State

STYLES: dict[State, str] = {
    "running": "cyan", "elsewhere": "cyan dim", "done": "green", "pruned": "yellow", "failed": "bold red",
    "queued": "dim",
}  # fmt: skip
# the order in which attempts are shown if not all fit
URGENCY: tuple[State, ...] = ("running", "failed", "elsewhere", "queued", "pruned", "done")
FRAME_LINES = 6  # heading, rule, summary, and room for what the shell prints
REFRESH_SECONDS = 0.5  # drawing takes time from the jobs
Durations = dict[str, list[float]]  # seconds of finished runs, by arm
ANY_ARM = ""


class Tally:
    """Attempts by state, kept up to date, so that a look at those that run does not go through all the others."""

    def __init__(self, attempts: Sequence[Attempt]) -> None:
        self.numbers = {id(attempt): number for number, attempt in enumerate(attempts, 1)}
        self.states: dict[int, State] = {}  # by number
        self.by_state: dict[State, dict[int, Attempt]] = {state: {} for state in URGENCY}
        self.lengths, self.seconds = 0, 0.0  # how many were done here, and how long they took together
        for attempt in attempts:
            self.note(attempt)

    def note(self, attempt: Attempt) -> None:
        """Take down the state of an attempt."""
        number = self.numbers[id(attempt)]
        if number in self.states:
            del self.by_state[self.states[number]][number]
        self.states[number] = attempt.state
        self.by_state[attempt.state][number] = attempt
        if attempt.state == "done" and attempt.started:
            self.lengths, self.seconds = self.lengths + 1, self.seconds + attempt.seconds

    @property
    def counts(self) -> dict[State, int]:
        """How many attempts are in each state."""
        return {state: len(attempts) for state, attempts in self.by_state.items()}


class View:
    """A display of attempts, which the pool changes; it is entered while the pool runs."""

    def __init__(self, attempts: Sequence[Attempt], slots: int, console: Console) -> None:
        self.tally = Tally(attempts)
        self.slots = slots
        self.console = console
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

    def changed(self, attempt: Attempt) -> None:
        """Print that an attempt has a new state; a terminal shows it in the live table."""
        self.tally.note(attempt)
        if self.live:
            return
        number = f"[{self.tally.numbers[id(attempt)]}/{len(self.tally.numbers)}]"
        took = f" in {clock(attempt.seconds)}" if attempt.started else ""
        said = {"done": took, "failed": f": {attempt.error}"}.get(attempt.state, "")
        self.console.print(f"{number} {attempt.state:<7} {attempt.label}{said}", soft_wrap=True)

    def interrupted(self) -> None:
        """Print what is kept of a sweep that was stopped, once its jobs have ended."""
        counts, began = self.tally.counts, self.tally.by_state["running"].values()
        steps = ", ".join(f"step {said['step']}" for attempt in began if "step" in (said := attempt.progress()))
        saved = f"{len(began)} stopped" + (f" (about {steps})" if steps else "")
        self.console.print(
            f"stopped: {counts['done']} done, {saved}, {counts['queued']} not begun; nothing that is saved is "
            "lost: the same command goes on from there",
            soft_wrap=True,
        )

    def refresh(self) -> None:
        """Show how far the jobs are by now."""
        if self.live and time.monotonic() - self.drawn >= REFRESH_SECONDS:
            self._draw(self.live)

    def _draw(self, live: Live) -> None:
        live.update(draw(self.tally, self.slots, self.console.height), refresh=True)
        self.drawn = time.monotonic()


def draw(tally: Tally, slots: int, height: int) -> Table:
    """Return the live table, of the most urgent attempts if `height` lines do not hold all."""
    by_urgency = chain.from_iterable(tally.by_state[state].items() for state in URGENCY)
    shown = sorted(islice(by_urgency, max(1, height - FRAME_LINES)))
    known = [*tally.by_state["running"].values(), *(attempt for _, attempt in shown if attempt.state == "done")]
    progress = {id(attempt): attempt.progress() for attempt in known}
    counts = tally.counts
    left = seconds_left(tally, progress, slots)
    summary = ", ".join(f"{counts[state]} {state}" for state in ("running", "queued", "done", "failed"))
    summary += "".join(f", {counts[state]} {state}" for state in ("elsewhere", "pruned") if counts[state])
    caption = f"{summary}; about {clock(left)} left" if left else summary
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left", caption_style="")
    grid.add_column("run", no_wrap=True)
    grid.add_column("state", no_wrap=True, max_width=40)  # the final table has the whole of an error
    for heading in ("step", "loss", "tokens/s", "time", "left"):
        grid.add_column(heading, justify="right", no_wrap=True)
    for _, attempt in shown:
        grid.add_row(*_cells(attempt, progress.get(id(attempt), {})), style=STYLES[attempt.state])
    if more := len(tally.numbers) - len(shown):
        grid.add_row(f"and {more} more", style="dim")
    return grid


def seconds_left(tally: Tally, progress: dict[int, dict[str, Any]], slots: int) -> float | None:
    """Return the seconds until the last job ends, if queued ones take as long as known ones; None if none is known."""
    running = tally.by_state["running"].values()
    said = {id(a): float(left) for a in running if (left := progress[id(a)].get("seconds_left")) is not None}
    lengths = [attempt.seconds + said[id(attempt)] for attempt in running if id(attempt) in said]
    if not (tally.lengths or lengths):
        return None
    typical = (tally.seconds + sum(lengths)) / (tally.lengths + len(lengths))
    rest = [said.get(id(attempt), max(0.0, typical - attempt.seconds)) for attempt in running]
    return max([*rest, (sum(rest) + tally.counts["queued"] * typical) / slots])


def forecast(attempts: Sequence[Attempt], slots: int) -> tuple[Table, str]:
    """Return a line for each run, and how long those that are not finished will take, `slots` at once."""
    durations: Durations = defaultdict(list)
    for folder in {attempt.folder.path.parent for attempt in attempts}:
        _add_durations(durations, folder)
    durations[ANY_ARM] = [*chain.from_iterable(durations.values())]
    typical = {arm: fmean(seconds) for arm, seconds in durations.items() if seconds}
    grid = new_grid("dry run: nothing is started")
    for heading in ("run", "is", "folder"):
        grid.add_column(heading, overflow="fold")
    grid.add_column("expected", justify="right")
    waiting: list[float | None] = []
    for attempt in attempts:
        expected = ""
        if attempt.state == "queued":
            waiting.append(_expected_seconds(attempt, typical))
            expected = "?" if waiting[-1] is None else clock(waiting[-1])
        grid.add_row(attempt.label, attempt.kind, attempt.folder.path.name, expected)
    return grid, _total(waiting, slots)


def _cells(attempt: Attempt, progress: dict[str, Any]) -> list[Text]:
    said = str(progress.get("phase", attempt.state))
    if attempt.state == "done":
        progress, said = progress | {"seconds_left": None}, "done"
    state = f"failed: {attempt.error}" if attempt.state == "failed" else said
    step = f"{progress['step']}/{progress['max_steps']}" if "step" in progress else ""
    loss, speed, left = (progress.get(key) for key in ("loss", "tokens_per_second", "seconds_left"))
    cells = [
        attempt.label,
        state,
        step,
        "" if loss is None else f"{loss:.3f}",
        "" if speed is None else f"{speed:,.0f}",
        clock(attempt.seconds) if attempt.started else "",
        "" if left is None else clock(left),
    ]
    return [Text(cell) for cell in cells]


def _total(waiting: Sequence[float | None], slots: int) -> str:
    if not waiting:
        return "Nothing is left to run."
    known = [seconds for seconds in waiting if seconds is not None]
    if len(known) < len(waiting):
        return f"{len(waiting)} to run, {slots} at once; no finished run beside them tells how long they take."
    total = max(sum(known) / slots, *known)
    return f"{len(waiting)} to run, {slots} at once: about {clock(total)}, going by the runs that are finished."


def _expected_seconds(attempt: Attempt, typical: Mapping[str, float]) -> float | None:
    """Return how long a run will take, by the finished runs of the same arm, else by all of them.

    What a broken-off run has done already is subtracted.
    """
    if not typical:
        return None
    progress = attempt.progress() if attempt.kind == "resumed" else {}
    whole = typical.get(_arm(attempt.job.spec), typical[ANY_ARM])
    return whole * float(1 - progress.get("step", 0) / progress.get("max_steps", 1))


def _add_durations(durations: Durations, folder: Path) -> None:
    """Add the seconds of the finished runs in outputs/<name>."""
    for file in folder.glob("*/record.json"):
        run = RunFolder(file.parent)
        record = run.valid_record()
        if record is not None and record["status"] == "finished" and "seconds" in record:
            durations[_arm(run.read_spec())].append(float(record["seconds"]))


def _arm(spec: RunSpec) -> str:
    return config_hash({key: value for key, value in spec.written.items() if key != "seed"})
