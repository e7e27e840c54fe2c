"""The process of a job is given a folder: that is all it reads of what it is to do, and where it says how it went."""

import json
import os
from pathlib import Path

import pytest

from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.sweep.worker import CONSOLE_FILE, Assignment, work
from tests.sweep.conftest import BOTH_STARTS

NOTING = str(Path(__file__).with_name("noting"))  # for PYTHONPATH


def noted(app, file):
    """What processes have noted, each with its id, and the ids of those that did a job."""
    return [json.loads(line) for line in app.lines(file)], {json.loads(line)["pid"] for line in app.lines("started")}


@BOTH_STARTS
def test_a_job_reads_the_config_of_its_folder_and_no_other(app, preload):
    sweep = app.run("-m", "seed=0-1", preload=preload, PYTHONPATH=NOTING)
    assert sweep.returncode == 0, sweep.stderr
    opened, jobs = noted(app, "opened")
    assert len(jobs) == 2
    files = {(app.folder / file).resolve() for pid, file in opened if pid in jobs}
    assert files == {app.run_folder(seed) / "config.yaml" for seed in (0, 1)}
    assert not [line for pid, _, line in noted(app, "parsed")[0] if pid in jobs]


@pytest.fixture
def assignment(write_run):
    """Of a run whose folder is written."""
    spec = RunFolder(write_run(status=None)).read_spec()
    return Assignment.of(spec, os.getpid())


def test_a_config_that_was_changed_since_the_sweep_has_looked_is_refused(assignment, monkeypatch, capfd):
    monkeypatch.chdir(assignment.directory)
    assert assignment.read().trusted
    folder = Path(assignment.folder)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 5"))
    with pytest.raises(UserError, match="belongs to another config"):
        assignment.read()
    with capfd.disabled():  # which takes the place of what a process has
        assert work(assignment) == 1
    assert (folder / CONSOLE_FILE).read_text().startswith(f"error: {assignment.folder} belongs to another")
    assert not (folder / "train.log").exists()


@BOTH_STARTS
def test_what_a_job_says_last_is_in_its_console_and_its_record(app, preload):
    app.behave({0: "crash", 1: "refuse"})
    sweep = app.run("-m", "seed=0-1", preload=preload)
    assert sweep.returncode == 1
    ends = {0: "RuntimeError: the loss is nan", 1: "no space left"}
    consoles = [(app.run_folder(seed) / CONSOLE_FILE).read_text().splitlines() for seed in ends]
    assert "Traceback (most recent call last):" in consoles[0]
    assert [console[-1] for console in consoles] == [ends[0], f"error: {ends[1]}"]
    for seed, error in ends.items():
        assert (app.record(seed)["status"], app.record(seed)["error"]) == ("failed", error)
