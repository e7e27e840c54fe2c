"""Run programs of this repository as forks of a server that has already imported their libraries.

A fork is a separate process with its own arguments, environment, exit code and signals.
"""

import atexit
import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from simbal import processes
from tests.child_processes import DEADLINE_SECONDS

REPOSITORY = Path(__file__).parents[1]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# what train.py and report.py import, with what a job does
PRELOAD = (
    "alembic.command", "altair", "hydra.main", "hydra_plugins.simbal_plugins.grid",
    "hydra_plugins.simbal_plugins.launchers", "hydra_plugins.simbal_plugins.optuna", "jinja2",
    "numpy.random", "s3fs", "simbal.cli.resume",
    "simbal.cli.command_line", "simbal.report.page", "simbal.sweeping.search.search", "simbal.training.run",
    "sqlalchemy.dialects.sqlite", "sqlalchemy.orm", "torch.utils.tensorboard",
)  # fmt: skip


class Program:
    """A program that runs, as `subprocess.Popen` has it with texts in pipes."""

    def __init__(self, program: str, *arguments: str, cwd: Path, **environment: str) -> None:
        """Start it with the variables of this process and these; `sitecustomize` of PYTHONPATH is heeded."""
        self.args = [str(REPOSITORY / program), *arguments]
        self.stdout, self.stderr = (tempfile.NamedTemporaryFile("r") for _ in range(2))  # noqa: SIM115
        task = {"args": self.args, "cwd": str(cwd), "stdout": self.stdout.name, "stderr": self.stderr.name}
        self.process = server().start(task, os.environ | environment)
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """The same."""
        return self.process.poll()

    def communicate(self) -> tuple[str, str]:
        """Wait for its end, and return all that it has printed and has not been read yet, once."""
        assert isinstance(self.process.process, ForkServerProcess)
        self.process.process.join(DEADLINE_SECONDS)
        assert self.process.poll() is not None, f"{self.args} hangs"
        with self.stdout, self.stderr:  # closed here, not whenever garbage is collected: that warns in another test
            return self.stdout.read(), self.stderr.read()

    def completed(self) -> "subprocess.CompletedProcess[str]":
        """Wait for its end, which is near: whatever goes wrong, it does not outlive this."""
        try:
            out, err = self.communicate()
        finally:
            self.kill()
        code = self.poll()
        assert code is not None
        return subprocess.CompletedProcess(self.args, code, out, err)

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def server() -> processes.ForkServer:
    """Return the server of this process, which is the same one as long as it lives."""
    return processes.ForkServer(_be, PRELOAD, ONE_THREAD)


def run(program: str, *arguments: str, cwd: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end."""
    return Program(program, *arguments, cwd=cwd, **environment).completed()


def _be(task: Mapping[str, Any]) -> int:
    """Become the program of the task."""
    gc.freeze()  # a collection of garbage would copy every page of the server
    os.chdir(task["cwd"])
    for stream, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(task[name], os.O_WRONLY | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv, sys.orig_argv = [*task["args"]], [sys.executable, *task["args"]]
    processes.ForkServer = ForkHere  # type: ignore[misc]
    _customize()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    finally:
        threading._shutdown()  # a program ends with it, and so do the processes of loky's executors
    return 0


def _customize() -> None:
    """Apply PYTHONPATH as a new Python process does."""
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:0] = places
    for place in places:
        if (file := Path(place, "sitecustomize.py")).exists():
            runpy.run_path(str(file))
            return


class ForkHere(processes.ForkServer):
    """In place of a sweep's fork server: fork each job from this process, which has imported everything."""

    def __init__(self, work: Callable[[processes.Task], int], preload: Sequence[str], environment: Mapping[str, str]):
        for name in preload:
            import_module(name)
        self.work, self.environment = partial(_work_in_fork, work), dict(environment)
        self.context = multiprocessing.get_context("fork")  # type: ignore[assignment]

    def start(self, task: processes.Task, environment: Mapping[str, str]) -> processes.LocalProcess:
        """Fork a process for the task."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the fork uses none of our threads
            return super().start(task, environment)


def _work_in_fork(work: Callable[[processes.Task], int], task: processes.Task) -> int:
    """Do the work without the signal handlers, exit functions and redirected output of the sweep."""
    atexit._clear()
    faulthandler.disable()  # of pytest
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    return work(task)
