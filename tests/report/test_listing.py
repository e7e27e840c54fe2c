"""Every folder is listed as what it is; nothing in one makes a list fail."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from simbal.errors import UserError
from simbal.report.listing import known_names, look, runs_below, size
from simbal.report.listing_table import show
from simbal.runs.folder import RunFolder


def by_status(folder):
    return {one.path.name: one.status for one in runs_below([folder])}


def shown(folder, width):
    values = [one.values for one in runs_below([folder])]
    out = Console(width=width, file=None, record=True, highlight=False, emoji=False, markup=False)
    with out.capture() as captured:
        show(values, 0, out)
    return captured.get()


@pytest.fixture
def every_kind(write_run):
    """outputs/ with a sweep of which each folder is of another kind, named by it."""

    def renamed(path, name):
        return path.rename(path.with_name(name))

    renamed(write_run("lbl", 0), "finished")
    renamed(write_run("lbl", 1, status="failed", error="out of memory"), "failed")
    renamed(write_run("lbl", 2, status="diverged", error="the loss was NaN", step=7), "diverged")
    renamed(write_run("lbl", 3, status="killed", error="killed by signal 9"), "killed")
    begun = renamed(write_run("lbl", 4, status=None), "unfinished")
    (begun / "progress.json").write_text(json.dumps({"step": 40, "max_steps": 400, "loss": 5.0}))
    damaged = renamed(write_run("lbl", 5), "damaged")
    (damaged / "record.json").write_text("{")
    changed = renamed(write_run("lbl", 6), "changed")
    (changed / "config.yaml").write_text((changed / "config.yaml").read_text() + "# a word\n")
    sweep = changed.parent
    (sweep / "notes").mkdir()
    (sweep / "of_others").mkdir()
    (sweep / "of_others" / "config.yaml").write_text("theme: dark\n")
    (sweep / ".hidden").mkdir()
    (sweep.parent / "analysis").mkdir()
    return sweep


def test_every_folder_is_what_it_is(every_kind):
    expected = {name: name for name in ("finished", "failed", "diverged", "killed", "unfinished", "damaged")}
    expected |= {"changed": "damaged", "notes": "foreign", "of_others": "foreign"}
    assert by_status(every_kind) == expected
    assert by_status(every_kind.parent) == expected


def test_why_and_how_far_is_said(every_kind):
    found = {one.path.name: one for one in runs_below([every_kind])}
    assert found["failed"].error == "out of memory"
    assert found["diverged"].error == "diverged at step 7: the loss was NaN"
    assert "it is no JSON" in found["damaged"].error
    assert found["notes"].error == "it has no config.yaml"
    steps = {name: (found[name].step, found[name].steps) for name in ("finished", "diverged", "unfinished", "failed")}
    assert steps == {"finished": (400, 1000), "diverged": (7, 1000), "unfinished": (40, 1000), "failed": (None, 1000)}


def test_a_folder_that_lets_nobody_in_is_foreign(write_run, monkeypatch):
    path = write_run()
    closed = path.with_name("closed")
    closed.mkdir()
    ask = Path.exists

    def refused(self):
        if closed in self.parents:
            raise PermissionError(errno.EACCES, "Permission denied")
        return ask(self)

    monkeypatch.setattr(Path, "exists", refused)
    found = {one.path: (one.status, one.error) for one in runs_below([path.parent])}
    assert found[closed] == ("foreign", "it cannot be read: Permission denied")
    assert found[path] == ("finished", "")


def test_only_a_finished_run_has_numbers(every_kind):
    with_ppl = [one.path.name for one in runs_below([every_kind]) if "val/ppl" in one.values]
    assert with_ppl == ["finished"]


def test_a_run_that_is_held_is_running_and_looking_neither_writes_nor_takes_it(write_run):
    path = write_run(status=None)
    assert look(path).status == "unfinished"
    assert not (path / ".lock").exists()
    with RunFolder(path).lock():
        assert look(path).status == "running"
    assert look(path).status == "unfinished"


@pytest.mark.slow
def test_a_lock_whose_holder_was_killed_holds_nothing(write_run):
    path = write_run(status=None)
    said = subprocess.check_output([sys.executable, "-c", "import os; print(os.getpid())"], text=True)
    (path / ".lock").write_text(f"process {int(said)} on {os.uname().nodename}\n")
    assert look(path).status == "unfinished"


def test_arms_are_labelled_as_in_the_table_of_their_sweep(write_run):
    write_run("simbal", 0)
    path = write_run("simbal", 0, keys={"balancing.simbal.coef": 1.0})
    assert {one.arm for one in runs_below([path.parent])} == {"simbal coef=0.1", "simbal coef=1.0"}


def test_a_run_is_listed_once_and_a_missing_folder_is_refused(write_run, tmp_path):
    path = write_run()
    assert len(runs_below([path, path.parent, path.parent.parent])) == 1
    with pytest.raises(UserError, match="there is no folder"):
        runs_below([tmp_path / "nowhere"])
    assert runs_below([tmp_path]) == []


def test_a_size_counts_no_link_and_no_file_twice(tmp_path):
    (tmp_path / "large").write_bytes(os.urandom(1 << 16))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "large")
    assert size(folder) < 1 << 13
    (folder / "a").write_bytes(os.urandom(1 << 15))
    (folder / "b").hardlink_to(folder / "a")
    assert 1 << 15 <= size(folder) < 1 << 16


def test_everything_can_be_compared_with_or_without_runs():
    assert {"status", "optim.lr", "balancing", "val/loss"} <= known_names([])


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_list_fits_the_terminal_and_tells_all(every_kind, width):
    text = shown(every_kind, width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("diverged", "damaged", "foreign", "40/1000", "100.00", "out of memory", "of_others", "lbl"):
        assert word in text
    rows = [line for line in text.splitlines() if "lbl" in line and "400/1000" in line]
    assert len(rows) == (width > 80)
