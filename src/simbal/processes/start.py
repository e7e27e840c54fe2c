"""Starts the process of a job: a new Python, or a fork of a server that has imported its libraries already.

Importing torch and Lightning takes 3 s of processor time, which a fork need not repeat. Either way the process leads a
group of its own, which Ctrl-C in a terminal does not reach.
"""

import atexit
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from types import ModuleType
from typing import Any, Protocol

Task = dict[str, Any]  # a process's work, in values that JSON can hold
POLL_SECONDS = 0.1
TRIES, RESTART_SECONDS = 5, 0.2  # to start a process while its server dies


class Process(Protocol):
    """A started process, on this machine or another."""

    def begun(self) -> bool:
        """Whether it does its task by now: a cluster may let it wait for hours, also once more after it has begun."""

    def poll(self) -> int | None:
        """Return None while it runs, then its exit code; a negative one is the signal that ended it."""

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and to all that it has started, also if itself has ended."""


class Local:
    """A process of this machine; it leads a group."""

    def __init__(self, process: "subprocess.Popen[bytes] | ForkServerProcess") -> None:
        assert process.pid is not None
        self.process, self.pid = process, process.pid

    def begun(self) -> bool:
        """Return True."""
        return True

    def poll(self) -> int | None:
        """Return None while it runs, then its exit code; a negative one is the signal that ended it."""
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.wait()
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        if self.poll() is None:  # a fork that does not lead its group yet
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def end(processes: Sequence[Process], grace: float) -> None:
    """End processes with all that they have started: SIGTERM, at which runs save, and `grace` seconds later SIGKILL."""
    for process in processes:
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(POLL_SECONDS)
    for process in processes:
        process.signal(signal.SIGKILL)
        process.wait()


class Starter(Protocol):
    """A way to start a process and give it one task."""

    def start(self, task: Task, environment: Mapping[str, str]) -> Process:
        """Start a process with these variables."""


class Spawn:
    """A way to start processes: each runs a new Python, which imports what it needs."""

    def __init__(self, program: ModuleType) -> None:
        """Set the module that runs by `python -m` and reads its task from standard input by `read_task`."""
        self.program = program

    def start(self, task: Task, environment: Mapping[str, str]) -> Local:
        """Start a process, which reads its task from standard input."""
        process = subprocess.Popen(
            [sys.executable, "-m", self.program.__name__],
            stdin=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(json.dumps(task).encode())
        return Local(process)


def read_task() -> Task:
    """Return the task that `Spawn` has given this process."""
    with sys.stdin.buffer as pipe:
        return dict(json.load(pipe))


class ForkServer:
    """A way to start processes: each is a fork of a server that has imported `preload` and ends with this process."""

    def __init__(self, work: Callable[[Task], int], preload: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the server.

        Args:
            work: the function that a forked process calls with its task; it returns the exit code.
            preload: names of modules to import in the server.
            environment: variables that libraries read when they are imported, as OMP_NUM_THREADS is.
        """
        self.work, self.environment = work, dict(environment)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([work.__module__, *preload])
        with _added(self.environment):
            forkserver.ensure_running()

    def start(self, task: Task, environment: Mapping[str, str]) -> Local:
        """Fork a process that calls `work` with the task; a server that was killed is started again."""
        for left in reversed(range(TRIES)):
            process = self.context.Process(target=_lead, args=(self.work, task, dict(environment)), daemon=False)
            try:
                with _added(self.environment):  # a server that has been killed is started again here
                    process.start()
                break
            except (EOFError, ConnectionError):  # it was killed at this moment
                if not left:
                    raise
                time.sleep(RESTART_SECONDS)
        return Local(process)


def _lead(work: Callable[[Task], int], task: Task, environment: dict[str, str]) -> None:
    os.setsid()
    os.environ |= environment
    try:
        raise SystemExit(work(task))
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves without it


@contextmanager
def _added(environment: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
