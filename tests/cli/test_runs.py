"""`simbal runs`: lists and deletes; a mistake is one sentence, and scripts are asked nothing."""

import json

import pytest
from simbal.cli.runs import main

from simbal.runs.folder import RunFolder


@pytest.fixture
def outputs(write_run, tmp_path, monkeypatch):
    """outputs/fake with four runs, below the working folder."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("lbl", "simbal", "lbl")):
        write_run(name, seed, metrics={"val/loss": 5.0 - seed, "val/ppl": 100.0 + seed}, ended=f"2026-01-0{seed + 1}")
    write_run("lbl", 3, status="failed", error="out of memory", ended="2026-01-09")
    return tmp_path / "outputs"


def listed(capsys, *arguments):
    main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main([*arguments])
    said = capsys.readouterr()
    return f"{said.err}{end.value.code}"


def test_all_below_outputs_are_listed_the_newest_first(outputs, capsys):
    assert [run["seed"] for run in listed(capsys)] == [3, 2, 1, 0]
    assert [run["seed"] for run in listed(capsys, "--reverse")] == [0, 1, 2, 3]
    main([])
    assert "runs in outputs/fake" in capsys.readouterr().out


def test_they_are_sorted_and_limited(outputs, capsys):
    assert [run["seed"] for run in listed(capsys, "--sort", "loss")] == [2, 1, 0, 3]
    assert [run["seed"] for run in listed(capsys, "--sort", "val/loss", "--reverse")] == [0, 1, 2, 3]
    assert [run["seed"] for run in listed(capsys, "--sort", "seed", "outputs/fake")] == [0, 1, 2, 3]
    assert [run["seed"] for run in listed(capsys, "--sort", "ppl", "--limit", "1")] == [0]
    main(["--limit", "3"])
    assert "and 1 more" in capsys.readouterr().out


def test_a_script_reads_all_that_is_known(outputs, capsys):
    run = listed(capsys)[0]
    assert (run["status"], run["error"], run["arm"], run["name"]) == ("failed", "out of memory", "lbl", "fake")
    assert run["size"] > 0
    assert run["optim.lr"] > 0
    assert (run["folder"].startswith("outputs/fake/"), "val/ppl" in run) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["outputs/none"], "error: there is no folder outputs/none"),
        (["--sort", "los"], "error: runs have no los; did you mean val/loss?"),
        (["--limit", "0"], "error: --limit 0 must be at least 1"),
        (["delete", "outputs/none"], "error: there is no folder outputs/none"),
        (["delete", "outputs"], "error: outputs is no run, and holds none"),
        (["delete", "outputs/fake"], "error: 4 runs would be deleted: give --yes where nobody can be asked"),
    ],
)
def test_a_mistake_is_one_sentence(outputs, capsys, arguments, said):
    assert said in refused(capsys, *arguments)
    assert len([*(outputs / "fake").iterdir()]) == 4


def test_runs_are_deleted(outputs, capsys):
    run = listed(capsys)[-1]["folder"]
    main(["delete", run, "--yes"])
    assert capsys.readouterr().out == "deleted: 1 run\n"
    assert [run["seed"] for run in listed(capsys)] == [3, 2, 1]


def test_a_run_that_is_held_is_refused_as_busy(outputs, capsys):
    run = next((outputs / "fake").glob("lbl-*"))
    with RunFolder(run).lock():
        assert refused(capsys, "delete", str(run), "--yes").endswith("75")
    assert run.is_dir()
