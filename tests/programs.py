"""Programs of this repository as forks of a server that has imported their libraries, which saves seconds per start.

A fork is an independent process: it has its own arguments, environment and exit code, and receives signals.
"""

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from simbal.processes import start
from tests.child_processes import DEADLINE_SECONDS

REPOSITORY = Path(__file__).parents[1]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# imports of train.py, report.py and a job
PRELOAD = (
    "alembic.command", "altair", "hydra.main", "hydra_plugins.simbal_plugins.grid",
    "hydra_plugins.simbal_plugins.optuna_sweeper", "hydra_plugins.simbal_plugins.procs", "jinja2",
    "numpy.random", "s3fs", "simbal.cli.commands", "simbal.cli.resume", "simbal.report.page",
    "simbal.sweep.search.run", "simbal.training.run", "sqlalchemy.dialects.sqlite", "sqlalchemy.orm",
    "torch.utils.tensorboard",
)  # fmt: skip


class Program:
    """A running program, with the interface of `subprocess.Popen` and text pipes."""

    def __init__(self, program: str, *arguments: str, cwd: Path, **environment: str) -> None:
        """Start a program such as `train.py`, with `environment` added to the variables of this process."""
        self.args = [str(REPOSITORY / program), *arguments]
        self.stdout, self.stderr = (tempfile.NamedTemporaryFile("r") for _ in range(2))  # noqa: SIM115
        task = {"args": self.args, "cwd": str(cwd), "stdout": self.stdout.name, "stderr": self.stderr.name}
        self.process = server().start(task, os.environ | environment)
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or None while it runs."""
        return self.poll()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.process.poll()

    def communicate(self) -> tuple[str, str]:
        """Wait for the end and return stdout and stderr."""
        assert isinstance(self.process.process, ForkServerProcess)
        self.process.process.join(DEADLINE_SECONDS)
        assert self.process.poll() is not None, f"{self.args} hangs"
        with self.stdout, self.stderr:
            return self.stdout.read(), self.stderr.read()

    def completed(self) -> "subprocess.CompletedProcess[str]":
        """Wait for the end, as `subprocess.run` does; the program is killed if that fails."""
        try:
            out, err = self.communicate()
        finally:
            self.kill()
        code = self.poll()
        assert code is not None
        return subprocess.CompletedProcess(self.args, code, out, err)

    def send_signal(self, number: int) -> None:
        """Send a signal if the program runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def server() -> start.ForkServer:
    """Return the fork server, of which there is one per test process."""
    return start.ForkServer(_run_program, PRELOAD, ONE_THREAD)


def run(program: str, *arguments: str, cwd: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end."""
    return Program(program, *arguments, cwd=cwd, **environment).completed()


def _run_program(task: Mapping[str, Any]) -> int:
    """Turn this fork into the program of the task and return its exit code."""
    gc.freeze()  # a garbage collection would copy every page of the server
    os.chdir(task["cwd"])
    for stream, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(task[name], os.O_WRONLY | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv, sys.orig_argv = [*task["args"]], [sys.executable, *task["args"]]
    start.ForkServer = _Fork  # type: ignore[misc]
    _apply_pythonpath()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    finally:
        threading._shutdown()  # as at the end of a Python program; it stops the processes of loky's executors
    return 0


def _apply_pythonpath() -> None:
    """Add PYTHONPATH to sys.path and run its sitecustomize.py, as a new Python does."""
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:0] = places
    for file in (Path(place, "sitecustomize.py") for place in places):
        if file.exists():
            runpy.run_path(str(file))
            return


class _Fork(start.ForkServer):
    """Replaces a sweep's fork server: jobs are forks of the sweep, which has imported everything."""

    def __init__(self, work: Callable[[start.Task], int], preload: Sequence[str], environment: Mapping[str, str]):
        for name in preload:
            import_module(name)
        self.work, self.environment = partial(_work_without_handlers, work), dict(environment)
        self.context = multiprocessing.get_context("fork")  # type: ignore[assignment]


def _work_without_handlers(work: Callable[[start.Task], int], task: start.Task) -> int:
    """Do the work without the signal and exit handlers of the sweep."""
    atexit._clear()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return work(task)
