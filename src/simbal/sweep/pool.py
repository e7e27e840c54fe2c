"""A pool that runs jobs as processes, here or elsewhere, as many at once as it has slots, and polls them."""

import math
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import NoReturn

from simbal.errors import UserError
from simbal.processes import POLL_SECONDS, Process, Starter, stop_processes
from simbal.sweep.attempt import Attempt, State
from simbal.sweep.ending import record_exit
from simbal.sweep.view import View
from simbal.sweep.worker import Assignment

CLAIMS = 16  # that fail at a poll: another process may hold very many folders
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
PAGE_SECONDS = 30.0  # between two writings of index.html, which takes time from the jobs; as often as it reloads


@dataclass
class _Running:
    attempt: Attempt
    slot: dict[str, str]
    process: Process
    console_start: int  # bytes that its console.log had before


class Pool:
    """A runner that starts queued attempts, notes what has ended, and stops all of it if the sweep is stopped."""

    def __init__(self, slots: Sequence[dict[str, str]], starter: Starter, view: View) -> None:
        """Make a pool; each of `slots` holds the environment variables of one job at a time."""
        self.free = list(slots)
        self.starter = starter
        self.view = view
        self.running: list[_Running] = []
        self.waiting: deque[Attempt] = deque()  # not claimed, in the order of their next claims
        self.page_outdated, self.page_written = False, -math.inf  # when, in seconds of the monotonic clock

    def run(self, attempts: Sequence[Attempt]) -> None:
        """Run the queued attempts to their end, one way or another; those of another sweep are waited for.

        Ctrl-C or SIGTERM stop every job; neither marks a run as failed, so the next sweep goes on where they were.
        """
        with sigterm_raises():
            try:
                with self.view:
                    self._run(attempts)
            except (KeyboardInterrupt, SystemExit):
                self.view.interrupted()
                if self.page_written > -math.inf:
                    _write_pages(attempts, running=False)
                raise

    def _run(self, attempts: Sequence[Attempt]) -> None:
        self.waiting.extend(attempts)
        try:
            while self.waiting or self.running:
                self._fill()
                time.sleep(POLL_SECONDS)
                self._look()
                self.view.refresh()
                if self.running and self.page_outdated and time.monotonic() - self.page_written >= PAGE_SECONDS:
                    _write_pages(attempts, running=True)
                    self.page_outdated, self.page_written = False, time.monotonic()
        finally:
            self._stop()

    def _fill(self) -> None:
        """Claim the next folders for as many jobs as there are free slots."""
        failed = 0
        for _ in range(len(self.waiting)):
            if not self.free or failed == CLAIMS:
                return
            attempt = self.waiting.popleft()
            if (outcome := attempt.claim()) is None:
                self._start(attempt)
            else:
                failed += 1
                self._change(attempt, *outcome)

    def _start(self, attempt: Attempt) -> None:
        slot, start = self.free.pop(0), attempt.console_size()
        process = self.starter.start(asdict(Assignment.of(attempt.job.spec, os.getpid())), slot)
        self.running.append(_Running(attempt, slot, process, start))
        self._note_begun(self.running[-1])

    def _look(self) -> None:
        """Note which jobs have begun, or are queued again, and what became of those whose process has ended."""
        for running in [*self.running]:
            if running.process.poll() is None:
                self._note_begun(running)
            else:
                self._end(running)

    def _note_begun(self, running: _Running) -> None:
        self._change(running.attempt, "running" if running.process.begun() else "queued")

    def _end(self, running: _Running) -> None:
        self.running.remove(running)
        self.page_outdated = True
        self.free.append(running.slot)
        running.process.signal(signal.SIGKILL)  # what the job started and left behind
        folder, spec = running.attempt.folder, running.attempt.job.spec
        outcome = record_exit(folder, spec, running.process.wait(), running.console_start)
        self._change(running.attempt, *outcome)

    def _change(self, attempt: Attempt, state: State, error: str = "") -> None:
        if state == "elsewhere":
            self.waiting.append(attempt)
        if attempt.state == state:
            return
        attempt.state, attempt.error = state, error
        if state == "running":
            attempt.started, attempt.ended = time.monotonic(), None
        else:
            attempt.ended = time.monotonic()
        self.view.changed(attempt)

    def _stop(self) -> None:
        if not self.running:
            return
        previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        stop_processes([running.process for running in self.running], GRACE_SECONDS)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _write_pages(attempts: Sequence[Attempt], running: bool) -> None:
    """Write index.html of each folder of runs; an error in it does not end the sweep."""
    from simbal.report import page
    from simbal.report.report import read_table

    for folder in {attempt.folder.path.parent for attempt in attempts}:
        with suppress(UserError):
            page.write(read_table(folder), folder, running)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that the jobs are stopped on the way out."""

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
