"""Every run is listed with its status, even if a file is damaged."""

import json

import pytest
from rich.console import Console

from simbal.errors import UserError
from simbal.report.runs import list_run, list_runs, print_runs
from simbal.runs.folder import RunFolder

STATUSES = ("finished", "failed", "diverged", "killed", "unfinished", "damaged")


@pytest.fixture
def sweep(write_run):
    """A sweep with a folder of each status, named by it, one with a changed config, and one that is no run."""

    def write(name, seed, **fields):
        path = write_run("lbl", seed, **fields)
        return path.rename(path.with_name(name))

    write("finished", 0)
    write("failed", 1, status="failed", error="out of memory")
    write("diverged", 2, status="diverged", error="the loss was NaN", step=7)
    write("killed", 3, status="killed", error="killed by signal 9")
    progress = {"step": 40, "max_steps": 400, "loss": 5.0}
    (write("unfinished", 4, status=None) / "progress.json").write_text(json.dumps(progress))
    (write("damaged", 5) / "record.json").write_text("{")
    changed = write("changed", 6)
    (changed / "config.yaml").write_text((changed / "config.yaml").read_text() + "# a word\n")
    (changed.parent / "notes").mkdir()
    return changed.parent


def test_every_run_is_listed_with_its_status_error_and_step(sweep):
    found = {one.path.name: one for one in list_runs([sweep.parent])}
    assert {name: one.status for name, one in found.items()} == {
        **{status: status for status in STATUSES}, "changed": "damaged",
    }  # fmt: skip
    assert found["failed"].error == "out of memory"
    assert found["diverged"].error == "diverged at step 7: the loss was NaN"
    assert "record.json is damaged" in found["damaged"].error
    values = {name: one.values for name, one in found.items()}
    steps = {name: values[name]["step"] for name in ("finished", "diverged", "unfinished", "failed")}
    assert steps == {"finished": 400, "diverged": 7, "unfinished": 40, "failed": None}
    assert [name for name in values if "val/ppl" in values[name]] == ["finished"]


def test_a_locked_run_is_running_and_listing_neither_writes_nor_locks(write_run):
    path = write_run(status=None)
    assert list_run(path).status == "unfinished"
    assert not (path / ".lock").exists()
    with RunFolder(path).lock():
        assert list_run(path).status == "running"
    assert list_run(path).status == "unfinished"


def test_arms_are_labeled_as_in_the_table_and_each_run_is_listed_once(write_run, tmp_path):
    write_run("simbal", 0)
    path = write_run("simbal", 0, keys={"balancing.simbal.coef": 1.0})
    found = list_runs([path, path.parent, path.parent.parent])
    assert {one.arm for one in found} == {"simbal coef=0.1", "simbal coef=1.0"}
    assert len(found) == 2
    with pytest.raises(UserError, match="there is no folder"):
        list_runs([tmp_path / "nowhere"])


@pytest.mark.parametrize("width", [80, 120])
def test_the_list_fits_the_terminal(sweep, width):
    out = Console(width=width, highlight=False, emoji=False, markup=False)
    with out.capture() as captured:
        print_runs([one.values for one in list_runs([sweep])], 0, out)
    text = captured.get()
    assert max(map(len, text.splitlines())) <= width
    for word in ("diverged", "damaged", "40/1000", "100.00", "out of memory"):
        assert word in text
    assert ("lbl" in text) == (width > 80)
