"""What a person sees of a running sweep: a live table on a terminal, one line per change elsewhere."""

import time
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from simbal.sweep.attempt import Attempt, State

STYLES: dict[State, str] = {
    "running": "cyan", "elsewhere": "cyan dim", "done": "green", "pruned": "yellow", "failed": "bold red",
    "queued": "dim",
}  # fmt: skip
URGENCY: tuple[State, ...] = (
    "running",
    "failed",
    "elsewhere",
    "queued",
    "pruned",
    "done",
)  # who is shown
FRAME_LINES = 6  # heading, rule, summary, and room for what the shell prints
REFRESH_SECONDS = 0.5  # drawing takes time from the jobs


class View:
    """Shows attempts, which the pool changes; to be entered while it runs."""

    def __init__(self, attempts: Sequence[Attempt], slots: int, console: Console) -> None:
        self.attempts = attempts
        self.slots = slots
        self.console = console
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self.drawn = 0.0

    def __enter__(self) -> "View":
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self._draw(self.live)
            self.live.stop()

    def changed(self, attempt: Attempt) -> None:
        """Say that an attempt has a new state."""
        if self.live:
            return
        place = f"[{self.attempts.index(attempt) + 1}/{len(self.attempts)}]"
        said = {"done": f" in {clock(attempt.seconds)}", "failed": f": {attempt.error}"}.get(attempt.state, "")
        self.console.print(f"{place} {attempt.state:<7} {attempt.label}{said}", soft_wrap=True)

    def refresh(self) -> None:
        """Show how far the jobs are by now."""
        if self.live and time.monotonic() - self.drawn >= REFRESH_SECONDS:
            self._draw(self.live)

    def _draw(self, live: Live) -> None:
        live.update(draw(self.attempts, self.slots, self.console.height), refresh=True)
        self.drawn = time.monotonic()


def draw(attempts: Sequence[Attempt], slots: int, height: int) -> Table:
    """The live table, of the most urgent attempts if `height` lines do not hold all."""
    progress = {id(attempt): attempt.progress() for attempt in attempts if attempt.state == "running"}
    counts = Counter(attempt.state for attempt in attempts)
    left = seconds_left(attempts, progress, slots)
    summary = ", ".join(f"{counts[state]} {state}" for state in ("running", "queued", "done", "failed"))
    summary += "".join(f", {counts[state]} {state}" for state in ("elsewhere", "pruned") if counts[state])
    caption = f"{summary}; about {clock(left)} left" if left else summary
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left", caption_style="")
    grid.add_column("run", no_wrap=True)
    grid.add_column("state", no_wrap=True, max_width=40)  # the final table has the whole of an error
    for heading in ("step", "loss", "tokens/s", "time", "left"):
        grid.add_column(heading, justify="right", no_wrap=True)
    shown = sorted(attempts, key=lambda attempt: URGENCY.index(attempt.state))[: max(1, height - FRAME_LINES)]
    chosen = set(map(id, shown))
    for attempt in attempts:
        if id(attempt) in chosen:
            grid.add_row(*_cells(attempt, progress.get(id(attempt), {})), style=STYLES[attempt.state])
    if len(shown) < len(attempts):
        grid.add_row(f"and {len(attempts) - len(shown)} more", style="dim")
    return grid


def seconds_left(attempts: Sequence[Attempt], progress: dict[int, dict[str, Any]], slots: int) -> float | None:
    """Time until the last job ends, if queued ones take as long as those that are known; None while none is."""
    running = [attempt for attempt in attempts if attempt.state == "running"]
    said = {id(a): float(left) for a in running if (left := progress[id(a)].get("seconds_left")) is not None}
    lengths = [attempt.seconds for attempt in attempts if attempt.state == "done"]
    lengths += [attempt.seconds + said[id(attempt)] for attempt in running if id(attempt) in said]
    if not lengths:
        return None
    typical = fmean(lengths)
    rest = [said.get(id(attempt), max(0.0, typical - attempt.seconds)) for attempt in running]
    queued = sum(attempt.state == "queued" for attempt in attempts)
    return max([*rest, (sum(rest) + queued * typical) / slots])


def clock(seconds: float) -> str:
    """`2:05` or `1:02:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _cells(attempt: Attempt, progress: dict[str, Any]) -> list[Text]:
    state = f"failed: {attempt.error}" if attempt.state == "failed" else str(progress.get("phase", attempt.state))
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
