"""A sweep rewrites index.html when a job ends; the page reloads itself until the sweep has ended or was stopped."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from simbal.processes import LocalProcess
from simbal.sweep.attempt import Attempt
from simbal.sweep.composer import Job
from simbal.sweep.pool import Pool
from simbal.sweep.view import View

REFRESH = '<meta http-equiv="refresh" content="30">'


class Code:
    """Starts a Python with a program of its own for each run, by hash."""

    def __init__(self, programs):
        self.programs = programs

    def start(self, task, environment):
        program = [sys.executable, "-c", self.programs[task["hash"]]]
        return LocalProcess(subprocess.Popen(program, start_new_session=True))


def test_the_page_is_written_when_a_job_ends_and_reloads_until_the_sweep_is_stopped(small_spec):
    specs = [small_spec(f"seed={seed}") for seed in range(2)]
    attempts = [Attempt(Job([], spec), f"seed={seed}") for seed, spec in enumerate(specs)]
    file, seen = specs[0].path.parent / "index.html", []

    class StoppedLater(View):
        def refresh(self):
            if file.exists():
                seen.append(file.read_text())
                raise KeyboardInterrupt

    programs = {specs[0].hash: "raise SystemExit(1)", specs[1].hash: "import time; time.sleep(300)"}
    with pytest.raises(KeyboardInterrupt):
        Pool([{}, {}], Code(programs), StoppedLater(attempts, 2, Console(file=io.StringIO()))).run(attempts)
    (running,) = seen
    assert REFRESH in running
    assert "ended with exit code 1 and no result" in running
    assert REFRESH not in file.read_text()
