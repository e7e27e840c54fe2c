"""Runs jobs as processes of their own, as many at once as there are slots, from one thread that polls them."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from simbal.errors import UserError
from simbal.sweep.attempt import Attempt
from simbal.sweep.job import Job
from simbal.sweep.last_words import last_words
from simbal.sweep.tether import SWEEP_PID
from simbal.sweep.view import View

POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL


@dataclass
class _Process:
    attempt: Attempt
    slot: dict[str, str]
    popen: "subprocess.Popen[bytes]"
    console_start: int


class Pool:
    """Starts what is queued, notes what has ended, and stops all of it if the sweep is stopped."""

    def __init__(self, slots: Sequence[dict[str, str]], command: Callable[[Job], list[str]], view: View) -> None:
        """Each of `slots` is what one job at a time finds in its environment."""
        self.free = list(slots)
        self.command = command
        self.view = view
        self.running: list[_Process] = []

    def run(self, attempts: Sequence[Attempt]) -> None:
        """Run the queued attempts to their end, one way or another.

        Ctrl-C or SIGTERM stop every job; neither marks a run as failed, so the next sweep goes on where they were.
        """
        queue = [attempt for attempt in attempts if attempt.state == "queued"]
        with _sigterm_raises(), self.view:
            try:
                while queue or self.running:
                    while queue and self.free:
                        self._start(queue.pop(0))
                    time.sleep(POLL_SECONDS)
                    self._collect_ended()
                    self.view.refresh()
            finally:
                self._stop()

    def _start(self, attempt: Attempt) -> None:
        folder, spec = attempt.folder, attempt.job.spec
        try:
            with folder.lock():
                folder.write_spec(spec)
                for stale in ("record.json", "progress.json"):
                    (folder.path / stale).unlink(missing_ok=True)
        except UserError as error:
            self._end(attempt, str(error))
            return
        slot = self.free.pop(0)
        with (folder.path / "console.log").open("ab") as console:
            start = console.tell()
            popen = subprocess.Popen(
                self.command(attempt.job),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env={**os.environ, **slot, SWEEP_PID: str(os.getpid())},
                start_new_session=True,  # a group to signal, which the terminal's Ctrl-C does not reach
            )
            self.running.append(_Process(attempt, slot, popen, start))
        attempt.state, attempt.started = "running", time.monotonic()
        self.view.changed(attempt)

    def _collect_ended(self) -> None:
        for process in [process for process in self.running if process.popen.poll() is not None]:
            self.running.remove(process)
            self.free.append(process.slot)
            _signal(process, signal.SIGKILL)  # what the job started and left behind
            try:
                self._end(process.attempt, _failure(process))
            except UserError as error:  # another process has the folder, or its record is broken
                self._end(process.attempt, str(error))

    def _end(self, attempt: Attempt, error: str | None) -> None:
        attempt.state, attempt.error = ("done", "") if error is None else ("failed", error)
        attempt.ended = time.monotonic()
        self.view.changed(attempt)

    def _stop(self) -> None:
        if not self.running:
            return
        previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        for process in self.running:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and any(process.popen.poll() is None for process in self.running):
            time.sleep(POLL_SECONDS)
        for process in self.running:
            _signal(process, signal.SIGKILL)
            process.popen.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _failure(process: _Process) -> str | None:
    """Why there is no result, also written as the run's record if the run did not do so; None if there is one."""
    folder, spec = process.attempt.folder, process.attempt.job.spec
    if folder.finished(spec):
        return None
    record = folder.read_record()
    if record is None or record["status"] != "failed":
        error = last_words(folder.path / "console.log", process.console_start, process.popen.returncode)
        record = {"status": "failed", "config_hash": spec.hash, "choices": spec.choices}
        record |= {"seed": spec.config["seed"], "error": error}
        with folder.lock():
            folder.write_record(record)
    return str(record["error"])


def _signal(process: _Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.popen.pid, number)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that the jobs are stopped on the way out."""

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
