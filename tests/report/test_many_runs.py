"""Very many runs: what each costs is bounded, and what is left out is said."""

from itertools import pairwise
from pathlib import Path

import pytest

from simbal.report.arms import MOST_NAMED, listed
from simbal.report.collect import collect
from simbal.report.report import read_table
from simbal.report.table import build


@pytest.fixture
def opened(monkeypatch):
    """The files that are opened from now on."""
    files, real = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda file: files.append(file) or real(file))
    return files


def test_each_run_costs_as_many_files_however_many_there_are(write_run, opened):
    counts = []
    for seed in range(6):
        for balancing in ("lbl", "simbal"):
            folder = write_run(balancing, seed).parent
        opened.clear()
        read_table(folder)
        counts.append(len(opened))
    config_twice_record_curves_and_documents = 5
    assert {after - before for before, after in pairwise(counts)} == {2 * config_twice_record_curves_and_documents}


def test_what_runs_have_in_common_is_held_once(write_run):
    first, second = collect(write_run(seed=0).parent)[0], collect(write_run(seed=1).parent)[1]
    assert first.spec.config.model is second.spec.config.model
    assert first.definitions is not second.definitions
    assert first.result["definitions"] is second.result["definitions"]


def rates(table):
    return [(row.arm.balancing, row.arm.label["optim.lr"].value) for row in table.rows]


def test_the_best_arms_come_with_what_they_are_compared_with(write_run):
    for place, lr in enumerate((0.1, 0.2, 0.3)):
        folder = write_run("lbl", keys={"optim.lr": lr}, metrics={"val/loss": 5.0 + place}).parent
        write_run("simbal", keys={"optim.lr": lr}, metrics={"val/loss": 4.0 - place})
    table = build("t", collect(folder))
    assert table.of_best(6) is table
    assert rates(table.of_best(4)) == [("lbl", 0.2), ("lbl", 0.3), ("simbal", 0.2), ("simbal", 0.3)]
    assert all(row.other for row in table.of_best(4).rows if row.arm.balancing == "simbal")
    pairs = build("t", collect(folder), pairs=True).of_best(2).pairs
    assert [(row.arm.name, row.other.name) for row in pairs] == [("simbal lr=0.3", "lbl lr=0.3")]


def test_a_sentence_lists_no_more_names_than_can_be_read():
    names = [f"arm{number}" for number in range(MOST_NAMED + 1)]
    assert listed(names[:2]) == "arm0, arm1"
    assert listed(names[:-1]).endswith(f", arm{MOST_NAMED - 1}")
    assert listed(names).endswith(f", arm{MOST_NAMED - 1} and 1 more")
