"""Starts the process of a job: a new Python, or a fork of a server that has imported its libraries already.

Importing torch and Lightning takes 3 s of processor time, which a fork need not repeat. Either way the process leads a
group of its own, which Ctrl-C in a terminal does not reach.
"""

import atexit
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from types import ModuleType
from typing import Any

Task = dict[str, Any]  # a process's work, in values that JSON can hold
TRIES, RESTART_SECONDS = 5, 0.2  # to start a process while its server dies


class Forked:
    """A process of `ForkServer`."""

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid is not None
        self.process, self.pid = process, process.pid

    def poll(self) -> int | None:
        """Return None while it runs, then its exit code; a negative one is the signal that ended it."""
        return self.process.exitcode

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode


Process = subprocess.Popen[bytes] | Forked
"""A started process, which leads a process group: `pid`, `poll` and `wait`."""


class Spawn:
    """A way to start processes: each runs a new Python, which imports what it needs."""

    def __init__(self, program: ModuleType) -> None:
        """Set the module that runs by `python -m` and reads its task from standard input by `read_task`."""
        self.program = program

    def start(self, task: Task, environment: Mapping[str, str]) -> Process:
        """Start a process; its task, which may hold a password, does not appear in the list of processes."""
        process = subprocess.Popen(
            [sys.executable, "-m", self.program.__name__],
            stdin=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(json.dumps(task).encode())
        return process


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

    def start(self, task: Task, environment: Mapping[str, str]) -> Process:
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
        return Forked(process)


Starter = Spawn | ForkServer
"""A way to start a process and give it one task."""


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
