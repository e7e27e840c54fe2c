"""A damaged record costs one run and no sweep; a run that has diverged is left alone unless asked for."""

import json

import pytest

from simbal.runs.folder import RunFolder


def cut(text: bytes) -> bytes:
    return text[: len(text) // 2]


def flip(text: bytes) -> bytes:
    return text.replace(b'"tokens_per_second": 3.0', b'"tokens_per_second": 7.0')


def other(text: bytes) -> bytes:
    return b'{"status": "finished", "config_hash": ["os.system"]}'


@pytest.mark.parametrize("damage", [cut, *(pytest.param(way, marks=pytest.mark.slow) for way in (flip, other))])
def test_a_run_with_a_damaged_record_is_done_again_and_the_others_are_not(app, damage):
    first = app.run("-m", "seed=0-2")
    file = app.run_folder(1) / "record.json"
    damaged = damage(file.read_bytes())
    file.write_bytes(damaged)
    dry = app.run("-m", "seed=0-2", "dry_run=true")
    assert dry.returncode == 0, dry.stderr
    assert file.read_bytes() == damaged
    again = app.run("-m", "seed=0-2")
    assert again.returncode == 0, again.stderr
    assert f"outputs/default/{file.parent.name}/record.json is damaged (" in again.stdout
    assert "): the run is done again\n2 finished, 1 resumed, 0 new\n" in again.stdout
    assert app.started == [0, 1, 1, 2]
    assert app.record(1)["status"] == "finished"
    assert file.with_name("record.json.damaged").read_bytes() == damaged
    assert first.stdout.partition("default:")[2] == again.stdout.partition("default:")[2]
    said = RunFolder(file.parent).set_aside_damaged_record()
    assert said.startswith("record.json was damaged")


def test_a_diverged_run_has_failed_and_is_tried_again_only_when_asked(app):
    app.run("-m", "seed=0-1")
    folder = RunFolder(app.run_folder(1))
    spec = folder.read_spec()
    diverged = {"status": "diverged", "config_hash": spec.hash, "error": "the gradient was NaN", "step": 5}
    folder.write_record(diverged | {"layers": [{"grad_norm": None}]})
    again = app.run("-m", "seed=0-1")
    assert again.returncode == 1
    assert "1 finished, 1 failed before (retry_failed=true tries again)" in again.stdout
    assert "diverged at step 5" in " ".join(again.stdout.split())
    (line,) = json.loads((folder.path.parent / "table.json").read_text())["without_result"]
    assert (line["status"], line["error"]) == ("diverged", "diverged at step 5: the gradient was NaN")
    assert app.started == [0, 1]
    assert app.run("-m", "seed=0-1", "retry_failed=true").returncode == 0
    assert app.started == [0, 1, 1]


@pytest.mark.parametrize("name", ["../../x", "..", "/elsewhere/x", ".x"])
def test_a_name_that_leads_out_of_outputs_starts_nothing_and_makes_no_folder(app, name):
    before = {path.name for path in app.folder.iterdir()}
    sweep = app.run("-m", f"name={name}", "seed=0-1")
    assert sweep.returncode == 2
    assert f"name={name} " in sweep.stderr
    assert {path.name for path in app.folder.iterdir()} - before <= {"modules"}
