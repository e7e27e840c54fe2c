"""How a run ended is told apart from what has been damaged since; and a disk that refuses is a sentence."""

import json

import pytest

from simbal.runs.folder import DamagedRecordError, RunFolder
from simbal.runs.record import digest, error_of

RECORD = {"status": "failed", "config_hash": "a", "error": "out of memory"}
READ = RECORD | {"config": digest(b"")}


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def test_a_record_is_written_with_a_checksum_and_read_without_it(folder):
    folder.write_record(RECORD)
    assert len(json.loads((folder.path / "record.json").read_text())["sha256"]) == 64
    assert folder.read_record() == folder.whole_record() == READ


def test_nan_is_never_written(folder):
    with pytest.raises(ValueError, match="not JSON compliant"):
        folder.write_record(RECORD | {"metrics": {"val/ppl": float("nan")}})
    assert folder.read_record() is None


def test_a_damaged_record_is_set_aside_with_a_warning_that_outlives_the_process(folder):
    assert folder.set_aside_damaged_record() is None
    folder.write_record(RECORD)
    assert folder.set_aside_damaged_record() is None
    text = (folder.path / "record.json").read_bytes()
    (folder.path / "record.json").write_bytes(text[:-20])
    said = folder.set_aside_damaged_record()
    assert said.startswith("record.json was damaged (it is no JSON, or cut short): ")
    assert (folder.path / "record.json.damaged").read_bytes() == text[:-20]
    assert folder.read_record() is None
    assert folder.set_aside_damaged_record() == said


def test_a_run_with_a_damaged_record_is_not_finished(small_spec):
    spec = small_spec()
    folder = RunFolder(spec.path)
    folder.write_spec(spec)
    folder.write_record({
        "status": "finished", "config_hash": spec.hash, "data": {"tokens": "b"}, "definitions": {}, "steps": 1,
        "tokens": 2, "tokens_per_second": 3.0, "metrics": {},
    })  # fmt: skip
    assert folder.finished(spec)
    file = folder.path / "record.json"
    file.write_text(file.read_text().replace('"steps": 1', '"steps": 9'))
    assert not folder.finished(spec)


def test_a_diverged_run_says_where(folder):
    diverged = {"status": "diverged", "config_hash": "a", "error": "the loss was NaN", "step": 7, "layers": None}
    folder.write_record(diverged)
    assert error_of(folder.read_record()) == "diverged at step 7: the loss was NaN"
    assert error_of(diverged | {"error": "it diverged at step 7"}) == "it diverged at step 7"
    for lacking in ("error", "step"):
        folder.write_record({key: value for key, value in diverged.items() if key != lacking})
        with pytest.raises(DamagedRecordError, match=f"{lacking} is missing"):
            folder.read_record()


def test_a_config_that_lies_about_its_place_is_read_where_it_lies(small_spec, tmp_path):
    spec = small_spec()
    folder = RunFolder(spec.path)
    folder.write_spec(spec)
    file = folder.path / "config.yaml"
    file.write_text(file.read_text().replace("name: default", "name: elsewhere"))
    assert folder.belongs_to(spec)
    assert {path.name for path in tmp_path.iterdir()} == {"outputs"}
