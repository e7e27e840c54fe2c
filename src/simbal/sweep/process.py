"""Starts a program as a process: afresh, or forked from a server that has imported its libraries already.

Importing torch and Lightning takes 3 s of processor time, which a fork need not repeat.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Protocol

from simbal.sweep import worker
from simbal.sweep.tether import SWEEP_PID

TRIES, RESTART_SECONDS = 5, 0.2  # to start a process while its server dies


class Process(Protocol):
    """The leader of a process group."""

    pid: int

    def poll(self) -> int | None:
        """None while it runs, then its exit code; negative: the signal that ended it."""

    def wait(self) -> int:
        """Wait for its end; its exit code."""


class Starter(Protocol):
    """A way to start a program."""

    def start(self, command: Sequence[str], environment: Mapping[str, str], console: Path) -> Process:
        """Run `command`, a Python program, with these variables added; what it prints goes to the end of `console`."""


class Afresh:
    """Every program imports what it needs."""

    def start(self, command: Sequence[str], environment: Mapping[str, str], console: Path) -> Process:
        """As `Starter` says."""
        with console.open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, SWEEP_PID: str(os.getpid())},
                start_new_session=True,  # a group to signal, which the terminal's Ctrl-C does not reach
            )


class Forked:
    """A process of `ForkServer`."""

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid is not None
        self.process, self.pid = process, process.pid

    def poll(self) -> int | None:
        """As `Process` says."""
        return self.process.exitcode

    def wait(self) -> int:
        """As `Process` says."""
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode


class ForkServer:
    """Programs start from a copy of a process that has imported `preload`; it ends with the process that made it."""

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        """`environment`: variables that libraries read when they are imported, as OMP_NUM_THREADS is."""
        self.environment = dict(environment)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([worker.__name__, *preload])
        with _added(self.environment):
            forkserver.ensure_running()

    def start(self, command: Sequence[str], environment: Mapping[str, str], console: Path) -> Process:
        """As `Starter` says."""
        arguments = ([*command], dict(environment), str(console))
        for left in reversed(range(TRIES)):
            process = self.context.Process(target=worker.become, args=arguments, daemon=False)
            try:
                with _added(self.environment):  # a server that has been killed is started again here
                    process.start()
                break
            except (EOFError, ConnectionError):  # it was killed at this moment
                if not left:
                    raise
                time.sleep(RESTART_SECONDS)
        return Forked(process)


@contextmanager
def _added(environment: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def program() -> list[str]:
    """The Python program that this process runs, as a command."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return [sys.executable, *(["-m", spec.name] if spec else [str(Path(sys.argv[0]).absolute())])]
