"""`simbal runs` lists and deletes runs, and invalid arguments give a one-sentence error."""

import json

import pytest

from simbal.cli.commands import runs
from simbal.runs.folder import RunFolder


@pytest.fixture
def outputs(write_run, tmp_path, monkeypatch):
    """outputs/fake with four runs in the current folder."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("lbl", "simbal", "lbl")):
        write_run(name, seed, metrics={"val/loss": 5.0 - seed, "val/ppl": 100.0 + seed}, ended=f"2026-01-0{seed + 1}")
    write_run("lbl", 3, status="failed", error="out of memory", ended="2026-01-09")
    return tmp_path / "outputs"


def listed(capsys, *arguments):
    runs([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        runs([*arguments])
    return f"{capsys.readouterr().err}{end.value.code}"


@pytest.mark.parametrize(
    ("arguments", "seeds"),
    [
        ([], [3, 2, 1, 0]),
        (["--reverse"], [0, 1, 2, 3]),
        (["--sort", "loss"], [2, 1, 0, 3]),
        (["--sort", "val/loss", "--reverse"], [0, 1, 2, 3]),
        (["--sort", "seed", "outputs/fake"], [0, 1, 2, 3]),
        (["--sort", "ppl", "--limit", "1"], [0]),
    ],
)
def test_runs_are_sorted_and_limited(outputs, capsys, arguments, seeds):
    assert [run["seed"] for run in listed(capsys, *arguments)] == seeds


def test_files_and_folders_that_are_not_runs_are_ignored(outputs, capsys):
    (outputs / "fake" / "figures").mkdir()
    (outputs / "fake" / "table.md").touch()
    paths = [*map(str, (outputs / "fake").iterdir())]  # as the shell expands outputs/fake/*
    assert len(listed(capsys, *paths)) == 4
    runs(["delete", *paths, "--yes"])
    assert sorted(path.name for path in (outputs / "fake").iterdir()) == ["figures", "table.md"]


def test_table_shows_how_many_runs_are_left_out(outputs, capsys):
    runs(["--limit", "3"])
    out = capsys.readouterr().out
    assert "runs in outputs/fake" in out
    assert "and 1 more" in out


def test_json_has_every_value_of_a_run(outputs, capsys):
    run = listed(capsys)[0]
    assert (run["status"], run["error"], run["arm"], run["name"]) == ("failed", "out of memory", "lbl", "fake")
    assert run["size"] > 0
    assert run["optim.lr"] > 0
    assert (run["folder"].startswith("outputs/fake/"), "val/ppl" in run) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["outputs/none"], "error: there is no folder outputs/none"),
        (["--sort", "los"], "did you mean loss?"),
        (["--limit", "0"], "--limit 0"),
        (["delete", "outputs/none"], "error: there is no folder outputs/none"),
        (["delete", "outputs"], "error: outputs contains no run"),
        (["delete", "outputs/fake"], "add --yes"),
    ],
)
def test_mistake_is_a_one_sentence_error_and_deletes_nothing(outputs, capsys, arguments, message):
    assert message in refused(capsys, *arguments)
    assert len([*(outputs / "fake").iterdir()]) == 4


def test_runs_are_deleted_unless_they_are_in_use(outputs, capsys):
    run = listed(capsys)[-1]["folder"]
    runs(["delete", run, "--yes"])
    assert capsys.readouterr().out == "deleted: 1 run\n"
    assert [run["seed"] for run in listed(capsys)] == [3, 2, 1]
    busy = next((outputs / "fake").glob("lbl-*"))
    with RunFolder(busy).lock():
        assert refused(capsys, "delete", str(busy), "--yes").endswith("75")
    assert busy.is_dir()
