"""The process of a job is given a folder: that is all it reads of what it is to do, and where it says how it went."""

import json
import os
import signal
import subprocess
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest

from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.sweep.worker import CONSOLE_FILE, Assignment, output_to, work
from tests.sweep.conftest import BOTH_STARTS

NOTING = str(Path(__file__).with_name("noting"))  # for PYTHONPATH
PASSWORD = "p4ssw0rd"


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


def test_a_sweep_takes_each_override_apart_once_beside_hydra(app):
    sweep = app.run("-m", "seed=0-1", "balancing=simbal,lbl", "optim.lr=0.1", PYTHONPATH=NOTING)
    assert sweep.returncode == 0, sweep.stderr
    parsed, _ = noted(app, "parsed")
    lines = Counter(line for _, caller, line in parsed if not caller.startswith("hydra."))
    assert {"seed=0-1", "seed=0", "balancing=lbl", "optim.lr=0.1"} <= {*lines}
    assert max(lines.values()) == 1, lines


@BOTH_STARTS
def test_a_password_reaches_the_job_and_stands_in_no_file_argument_or_variable(app, preload):
    url = f"http://ada:{PASSWORD}@127.0.0.1:9/corpus.jsonl"
    app.behave({0: "hang"})
    sweep = app.start("-m", "data=files", f'data.files="{url}"', "seed=0", preload=preload)
    app.wait_until(lambda: len(app.lines("hanging")) == 2)
    (job,) = {json.loads(line)["pid"] for line in app.lines("started")}
    said = [Path(f"/proc/{job}/{file}").read_bytes() for file in ("cmdline", "environ")]
    sweep.send_signal(signal.SIGTERM)
    out, err = sweep.communicate()
    assert app.lines("addresses") == [sha256(url.encode()).hexdigest()]
    assert not any(PASSWORD.encode() in text for text in (*said, out.encode(), err.encode()))
    files = [file for file in app.folder.rglob("*") if file.is_file()]
    assert not [file for file in files if PASSWORD.encode() in file.read_bytes()]


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


def test_output_is_added_and_goes_where_it_went_afterwards(tmp_path, capfd):
    file = tmp_path / CONSOLE_FILE
    for word in ("first", "second"):
        with output_to(file):
            os.write(1, f"{word}\n".encode())
            subprocess.run(["sh", "-c", f"echo {word} of a child >&2"], check=True)
        os.write(1, b"afterwards\n")
    assert file.read_text() == "first\nfirst of a child\nsecond\nsecond of a child\n"
    assert capfd.readouterr().out == "afterwards\nafterwards\n"
