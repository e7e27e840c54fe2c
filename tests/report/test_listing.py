"""Every run is listed as what it is; nothing in one makes a list fail."""

import json

import pytest
from rich.console import Console

from simbal.errors import UserError
from simbal.report.listing import look, runs_below
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
    (sweep.parent / "analysis").mkdir()
    return sweep


def test_every_run_is_what_it_is(every_kind):
    expected = {name: name for name in ("finished", "failed", "diverged", "killed", "unfinished", "damaged")}
    expected["changed"] = "damaged"
    assert by_status(every_kind) == expected
    assert by_status(every_kind.parent) == expected


def test_why_and_how_far_is_said(every_kind):
    found = {one.path.name: one for one in runs_below([every_kind])}
    assert found["failed"].error == "out of memory"
    assert found["diverged"].error == "diverged at step 7: the loss was NaN"
    assert "not JSON" in found["damaged"].error
    steps = {name: found[name].step for name in ("finished", "diverged", "unfinished", "failed")}
    assert steps == {"finished": 400, "diverged": 7, "unfinished": 40, "failed": None}


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


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_list_fits_the_terminal_and_tells_all(every_kind, width):
    text = shown(every_kind, width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("diverged", "damaged", "40/1000", "100.00", "out of memory"):
        assert word in text
    assert ("lbl" in text) == (width > 80)
