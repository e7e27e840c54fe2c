"""A pool of processes, on this machine or a cluster: start jobs, poll them and record how they ended."""

import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from simbal.errors import UserError
from simbal.processes import POLL_SECONDS, Process, Starter, stop_processes
from simbal.runs.folder import CONSOLE_FILE
from simbal.sweeping.outcome import record_exit
from simbal.sweeping.plan import Attempt, State
from simbal.sweeping.view import View
from simbal.sweeping.worker import make_task

MAX_REFUSALS = 16  # per poll, because each locked folder takes 0.2 s
PAGE_SECONDS = 30.0  # between updates of index.html, which reloads at the same interval


@dataclass
class RunningJob:
    """A job in the pool."""

    attempt: Attempt
    slot: dict[str, str]
    process: Process
    console_start: int  # size of console.log before this attempt


class Pool:
    """Run queued attempts, as many at once as there are slots."""

    def __init__(self, slots: Sequence[dict[str, str]], starter: Starter, view: View) -> None:
        """Create a pool; each slot holds the environment variables of one job at a time."""
        self.free = list(slots)
        self.starter = starter
        self.view = view
        self.running: list[RunningJob] = []
        self.waiting: deque[Attempt] = deque()
        self.page_is_stale = False
        self.page_written: float | None = None  # in seconds of the monotonic clock

    def run(self, attempts: Sequence[Attempt]) -> None:
        """Run the queued attempts until all have ended, and wait for runs that another process is writing.

        Ctrl-C and SIGTERM stop all jobs. Stopped runs do not count as failed, so the next sweep resumes them.
        """
        self.waiting.extend(attempts)
        with exit_on_sigterm():
            try:
                with self.view:
                    self._run(attempts)
            except (KeyboardInterrupt, SystemExit):
                self.view.print_interruption()
                if self.page_written is not None:
                    _write_pages(attempts, running=False)
                raise

    def _run(self, attempts: Sequence[Attempt]) -> None:
        try:
            while self.waiting or self.running:
                self._start_jobs()
                time.sleep(POLL_SECONDS)
                for job in [*self.running]:
                    if job.process.poll() is None:
                        self._update_state(job)
                    else:
                        self._finish(job)
                self.view.refresh()
                is_due = self.page_written is None or time.monotonic() - self.page_written >= PAGE_SECONDS
                if self.running and self.page_is_stale and is_due:
                    _write_pages(attempts, running=True)
                    self.page_is_stale, self.page_written = False, time.monotonic()
        finally:
            self._stop()

    def _start_jobs(self) -> None:
        """Start as many waiting jobs as there are free slots."""
        refusals = 0
        for _ in range(len(self.waiting)):
            if not self.free or refusals == MAX_REFUSALS:
                return
            attempt = self.waiting.popleft()
            if (outcome := attempt.prepare_folder()) is None:
                self._start(attempt)
            else:
                refusals += 1
                self._change_state(attempt, *outcome)

    def _start(self, attempt: Attempt) -> None:
        console, slot = attempt.folder.path / CONSOLE_FILE, self.free.pop(0)
        console_start = console.stat().st_size if console.exists() else 0
        process = self.starter.start(make_task(attempt.job.spec, os.getpid()), slot)
        self.running.append(RunningJob(attempt, slot, process, console_start))
        self._update_state(self.running[-1])

    def _update_state(self, job: RunningJob) -> None:
        self._change_state(job.attempt, "running" if job.process.begun() else "queued")

    def _finish(self, job: RunningJob) -> None:
        self.running.remove(job)
        self.free.append(job.slot)
        self.page_is_stale = True
        job.process.signal(signal.SIGKILL)  # child processes that the job left behind
        attempt = job.attempt
        outcome = record_exit(attempt.folder, attempt.job.spec, job.process.wait(), job.console_start)
        if outcome[0] == "done" and attempt.kind == "resumed":
            attempt.total = (attempt.folder.valid_record() or {}).get("seconds")
        self._change_state(attempt, *outcome)

    def _change_state(self, attempt: Attempt, state: State, error: str = "") -> None:
        if state == "locked":
            self.waiting.append(attempt)
        if attempt.state == state:
            return
        attempt.state, attempt.error = state, error
        if state == "running":
            attempt.started, attempt.ended = time.monotonic(), None
        else:
            attempt.ended = time.monotonic()
        self.view.print_change(attempt)

    def _stop(self) -> None:
        if not self.running:
            return
        # a second Ctrl-C must not interrupt the shutdown of the jobs
        previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
        stop_processes([job.process for job in self.running])
        for number, handler in previous.items():
            signal.signal(number, handler)


def _write_pages(attempts: Sequence[Attempt], running: bool) -> None:
    """Write index.html of each folder. An error does not end the sweep."""
    from simbal.report import page
    from simbal.report.report import read_table

    for folder in {attempt.folder.path.parent for attempt in attempts}:
        with suppress(UserError):
            page.write(read_table(folder), folder, running)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Raise `SystemExit` on SIGTERM within the block, so that the jobs are stopped as after Ctrl-C."""

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
