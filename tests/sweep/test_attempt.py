"""A sweep takes a run for itself, leaves it to who has it, or says what is in the way."""

import os

import pytest

from simbal.runs.folder import RunFolder
from simbal.sweep.attempt import Attempt
from simbal.sweep.composer import Job
from simbal.sweep.ending import record_exit
from simbal.sweep.resume import plan


@pytest.fixture
def attempt(base_spec, write_run):
    """Of a run that has begun and is not finished."""
    spec = RunFolder(write_run(status=None)).read_spec()
    return Attempt(Job([], spec), "a run")


def end(attempt, exit_code=1, said="error: no space left\n"):
    """A job's process has ended with this code, after it has said this."""
    (attempt.folder.path / "console.log").write_text(said)
    return record_exit(attempt.folder, attempt.job.spec, exit_code, 0)


def test_a_run_that_nobody_has_is_claimed_and_what_an_earlier_try_has_left_is_gone(attempt):
    end(attempt)
    (again,) = plan([attempt.job], retry_failed=True)
    (again.folder.path / "progress.json").write_text("{}")
    assert again.claim() is None
    assert again.folder.read_record() is None
    assert again.progress() == {}


def test_a_run_that_another_process_has_ended_since_the_sweep_began_is_not_claimed(attempt):
    end(attempt)
    assert attempt.claim() == ("failed", "no space left")
    assert attempt.folder.read_record()["error"] == "no space left"


def test_a_run_that_was_killed_elsewhere_is_claimed(attempt):
    end(attempt, -9)
    assert attempt.claim() is None


def test_a_run_that_another_process_has_is_not_claimed(attempt):
    with RunFolder(attempt.folder.path).lock():
        state, who = attempt.claim()
    assert state == "elsewhere"
    assert f"process {os.getpid()}" in who


def test_the_failure_of_a_job_does_not_take_the_place_of_a_record_that_is_there(attempt):
    end(attempt)
    assert end(attempt, said="") == ("failed", "no space left")
    assert attempt.folder.read_record()["error"] == "no space left"
