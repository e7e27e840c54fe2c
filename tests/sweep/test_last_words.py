"""The error of a dead job is what it said last."""

import io
import sys

import pytest
from rich.console import Console

from simbal.run_folder import RunFolder
from simbal.sweep import last_words as module
from simbal.sweep.attempt import Attempt
from simbal.sweep.job import Job
from simbal.sweep.last_words import last_words, oom_kills
from simbal.sweep.pool import Pool
from simbal.sweep.process import Afresh
from simbal.sweep.view import View

TRACEBACK = "Traceback (most recent call last):\n  File 'x', line 1\n    f()\n{}\n"


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ("step 1\nerror: no space left\n", 1, "no space left"),
        (
            TRACEBACK.format("ValueError: bad") + "\nSet the environment variable HYDRA_FULL_ERROR=1\n",
            1,
            "ValueError: bad",
        ),
        (
            TRACEBACK.format("KeyError: 1") + "\nDuring handling\n\n" + TRACEBACK.format("OSError: 2\nmore"),
            1,
            "OSError: 2",
        ),
        (TRACEBACK.format("ValueError: bad") + "error: no space left\n", 1, "no space left"),
        ("step 1\n", -9, "killed by signal 9"),
        ("error: only a warning\n", -9, "killed by signal 9"),
        ("step 1\n", 0, "ended with exit code 0 and no result"),
        ("", 3, "ended with exit code 3 and no result"),
        ("\xff\n", 3, "ended with exit code 3 and no result"),
    ],
)
def test_last_words(tmp_path, said, status, words):
    console = tmp_path / "console.log"
    console.write_text("error: of an earlier attempt\n" + said, encoding="latin-1")
    assert last_words(console, len("error: of an earlier attempt\n"), status) == words


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A file of what the kernel counts, with two processes killed for want of memory."""
    monkeypatch.setattr(module, "VMSTAT", tmp_path / "vmstat")
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 2\noom_kill_other 9\n")
    return tmp_path / "vmstat"


def test_the_kernel_says_how_often_memory_ran_out_and_elsewhere_nothing_does(kernel):
    assert oom_kills() == 2
    kernel.write_text("pgfault 7\n")
    assert oom_kills() == 0
    kernel.unlink()
    assert oom_kills() == 0


@pytest.mark.parametrize(
    ("status", "before", "hint"), [(-9, 1, True), (-9, 2, False), (-9, None, False), (-15, 1, False), (-11, 1, False)]
)
def test_only_a_job_killed_as_memory_ran_out_is_told_so(kernel, tmp_path, status, before, hint):
    words = last_words(tmp_path / "console.log", 0, status, before)
    assert words.startswith(f"killed by signal {-status}")
    assert ("for want of memory: a smaller trainer.micro_batch needs less" in words) == hint
    assert hint or words == f"killed by signal {-status}"


def test_a_sweep_says_which_job_was_killed_as_memory_ran_out(kernel, small_spec):
    specs = [small_spec(f"seed={seed}") for seed in range(2)]
    attempts = [Attempt(Job([], spec), f"seed={seed}") for seed, spec in enumerate(specs)]
    starved = f"open({str(kernel)!r}, 'w').write('oom_kill 3\\n')"
    codes = {specs[0].hash: "", specs[1].hash: starved}

    def command(job):
        return [sys.executable, "-c", f"import os; {codes[job.spec.hash]}\nos.kill(os.getpid(), 9)"]

    Pool([{}], Afresh(), command, View(attempts, 1, Console(file=io.StringIO()))).run(attempts)
    records = [RunFolder(spec.path).read_record() for spec in specs]
    assert [record["status"] for record in records] == ["killed", "killed"]
    assert records[0]["error"] == "killed by signal 9"
    assert records[1]["error"].startswith("killed by signal 9, while the kernel killed a process for want of memory:")
    assert [attempt.error for attempt in attempts] == [record["error"] for record in records]
