"""A pool that runs jobs as processes, as many at once as there are slots, from one thread that polls them."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import FrameType
from typing import NoReturn

from simbal.processes.start import Process, Starter
from simbal.sweep.attempt import Attempt, State
from simbal.sweep.ending import oom_kills, record_exit
from simbal.sweep.view import View
from simbal.sweep.worker import Assignment

POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL


@dataclass
class _Running:
    attempt: Attempt
    slot: dict[str, str]
    process: Process
    console_start: int  # bytes that its console.log had before
    oom_kills: int  # when it started


class Pool:
    """A runner that starts queued attempts, notes what has ended, and stops all of it if the sweep is stopped."""

    def __init__(self, slots: Sequence[dict[str, str]], starter: Starter, view: View) -> None:
        """Make a pool; each of `slots` holds the environment variables of one job at a time."""
        self.free = list(slots)
        self.starter = starter
        self.view = view
        self.running: list[_Running] = []

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
                raise

    def _run(self, attempts: Sequence[Attempt]) -> None:
        try:
            while any(attempt.state in ("queued", "running", "elsewhere") for attempt in attempts):
                for attempt in attempts if self.free else ():
                    self._start_if_possible(attempt)
                time.sleep(POLL_SECONDS)
                self._collect_ended()
                self.view.refresh()
        finally:
            self._stop()

    def _start_if_possible(self, attempt: Attempt) -> None:
        if not self.free or attempt.state not in ("queued", "elsewhere"):
            return
        if (outcome := attempt.claim()) is None:
            self._start(attempt)
        else:
            self._change(attempt, *outcome)

    def _start(self, attempt: Attempt) -> None:
        slot, start, before = self.free.pop(0), attempt.console_size(), oom_kills()
        process = self.starter.start(asdict(Assignment.of(attempt.job.spec, os.getpid())), slot)
        self.running.append(_Running(attempt, slot, process, start, before))
        self._change(attempt, "running")

    def _collect_ended(self) -> None:
        for running in [running for running in self.running if running.process.poll() is not None]:
            self.running.remove(running)
            self.free.append(running.slot)
            _signal_group(running, signal.SIGKILL)  # what the job started and left behind
            folder, spec = running.attempt.folder, running.attempt.job.spec
            outcome = record_exit(folder, spec, running.process.wait(), running.console_start, running.oom_kills)
            self._change(running.attempt, *outcome)

    def _change(self, attempt: Attempt, state: State, error: str = "") -> None:
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
        for running in self.running:
            _signal_group(running, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and any(running.process.poll() is None for running in self.running):
            time.sleep(POLL_SECONDS)
        for running in self.running:
            _signal_group(running, signal.SIGKILL)
            running.process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _signal_group(running: _Running, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(running.process.pid, number)
    if running.process.poll() is None:  # a fork that does not lead its group yet
        with suppress(ProcessLookupError):
            os.kill(running.process.pid, number)


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
