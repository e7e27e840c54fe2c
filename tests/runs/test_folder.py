"""A damaged record is never used as a result, a config is read as written, and only run folders are deleted."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from simbal.errors import BusyError, UserError
from simbal.report.collect import collect
from simbal.runs.curves import document_sums
from simbal.runs.folder import DamagedRecordError, RunFolder, config_text, delete_runs, parse_config, run_folders
from simbal.runs.record import digest, error_of, parse_record, with_checksum

RECORD = {
    "status": "finished", "config_hash": "c" * 64, "choices": {"balancing": "lbl"}, "seed": 3,
    "data": {"tokens": "b", "versions": {"numpy": "2.0"}}, "definitions": {"val/ppl": "exp of the loss"},
    "steps": 400, "tokens": 819_200, "tokens_per_second": 9000.5, "metrics": {"val/ppl": 12.25, "val/max_vio": None},
}  # fmt: skip
TEXT = json.dumps(with_checksum(RECORD)).encode()
FAILED = {"status": "failed", "config_hash": "a", "error": "out of memory"}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def parsed(text: bytes):
    try:
        return parse_record(text)
    except ValueError:
        return None


def test_a_record_that_is_truncated_or_changed_anywhere_is_damaged():
    assert parse_record(TEXT) == RECORD
    for position in range(len(TEXT)):
        changed = bytearray(TEXT)
        changed[position] ^= 1
        assert parsed(TEXT[:position]) is None
        assert parsed(bytes(changed)) in (None, RECORD), position  # the same: a space became another one
    for missing in ({"status": "done"}, {"status": "diverged"}):
        assert parsed(json.dumps(with_checksum({**RECORD, **missing})).encode()) is None


@pytest.mark.parametrize("text", [b"", b"null", b"[]", b"{", b"\xff\xfe{}", b"{}", b"1e999"])
def test_a_record_of_another_kind_is_an_error_with_a_remedy(folder, text):
    (folder.path / "record.json").write_bytes(text)
    assert folder.valid_record() is None
    with pytest.raises(DamagedRecordError, match="record.json is damaged .*: rerun its command"):
        folder.read_record()


@pytest.mark.parametrize("name", ["record.json", "config.yaml"])
def test_a_folder_in_place_of_a_file_is_a_one_sentence_error(write_run, name):
    path = write_run()
    (path / name).unlink()
    (path / name).mkdir()
    with pytest.raises(UserError, match=f"{path / name} cannot be read: Is a directory"):
        collect(path.parent)


def test_a_record_is_written_with_a_checksum_and_without_nan(folder):
    with pytest.raises(ValueError, match="not JSON compliant"):
        folder.write_record(FAILED | {"metrics": {"val/ppl": float("nan")}})
    assert folder.read_record() is None
    folder.write_record(FAILED)
    assert len(json.loads((folder.path / "record.json").read_text())["sha256"]) == 64
    assert folder.read_record() == folder.valid_record() == FAILED | {"config": digest(b"")}


def test_curves_that_were_changed_later_damage_the_record(folder):
    (folder.path / "metrics.jsonl").write_bytes(b"{}\n")
    folder.write_record(FAILED | {"curves": digest(b"{}\n")})
    assert folder.valid_record() is not None
    (folder.path / "metrics.jsonl").write_bytes(b"[]\n")
    assert folder.valid_record() is None


def test_a_damaged_record_is_set_aside_with_a_warning_that_outlives_the_process(folder):
    folder.write_record(FAILED)
    assert folder.set_aside_damaged_record() is None
    text = (folder.path / "record.json").read_bytes()
    (folder.path / "record.json").write_bytes(text[:-20])
    warning = folder.set_aside_damaged_record()
    assert "record.json.damaged" in warning
    assert (folder.path / "record.json.damaged").read_bytes() == text[:-20]
    assert folder.read_record() is None
    assert folder.set_aside_damaged_record() == warning


def test_a_run_with_a_damaged_record_is_not_finished(small_spec, tmp_path):
    spec = small_spec()
    folder = RunFolder(spec.path)
    folder.write_spec(spec)
    folder.write_record(RECORD | {"config_hash": spec.hash})
    assert folder.is_finished(spec)
    file = folder.path / "record.json"
    file.write_text(file.read_text().replace('"steps": 400', '"steps": 900'))
    assert not folder.is_finished(spec)
    assert {path.name for path in tmp_path.iterdir()} == {"outputs"}


def test_a_diverged_run_reports_its_step(folder):
    diverged = {"status": "diverged", "config_hash": "a", "error": "the loss was NaN", "step": 7, "layers": None}
    folder.write_record(diverged)
    assert error_of(folder.read_record()) == "diverged at step 7: the loss was NaN"
    assert error_of(diverged | {"error": "it diverged at step 7"}) == "it diverged at step 7"


@pytest.mark.parametrize("line", [None, "{", "[]", '{"nats": [1.0]}', '{"nats": [1.0], "tokens": [1.5]}', "short"])
def test_sums_by_document_are_read_and_a_damaged_file_is_named(tmp_path, line):
    file = tmp_path / "documents.json"
    assert document_sums(tmp_path) is None
    file.write_text('{"nats": [3.5, 0, 2], "tokens": [2, 0, 1], "bytes": [9, 0, 4]}')
    found = document_sums(tmp_path)
    assert ([*found.nats], [*found.tokens]) == ([3.5, 0.0, 2.0], [2, 0, 1])
    if line:
        file.write_text('{"nats": [1.0, 2.0], "tokens": [1]}' if line == "short" else line)
        with pytest.raises(UserError, match=f"{file} is damaged"):
            document_sums(tmp_path)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True) | st.text(), VALUES))
def test_a_config_is_read_as_pyyaml_reads_it_and_as_it_was_written(mapping):
    text = yaml.safe_dump(mapping, sort_keys=False)
    assert parse_config(text) == yaml.load(text, yaml.CSafeLoader)
    assert parse_config(config_text({"a": 1, **mapping})) == {"a": 1, **mapping}


@pytest.mark.parametrize(
    "text", ["a: !!python/object/apply:os.system ['touch x']", "", "- 1", "seed: [", "3", "a: 1\n b: 2"]
)
def test_a_text_that_is_not_a_mapping_of_plain_values_is_an_error(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((yaml.YAMLError, TypeError, ValueError)):
        parse_config(text)
    assert not [*tmp_path.iterdir()], "nothing is executed"


def test_runs_are_deleted_and_nothing_else(write_run, tmp_path):
    kept, gone = write_run(seed=0), write_run(seed=1)
    (kept.parent / "table.md").write_text("a table")
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    (gone / "link").symlink_to(precious)
    delete_runs(run_folders([gone]))
    assert sorted(path.name for path in kept.parent.iterdir()) == sorted([kept.name, "table.md"])
    assert (precious / "file").read_text() == "kept"


@pytest.mark.parametrize("name", ["nowhere", "empty", "of_others", "link"])
def test_a_folder_that_is_not_a_run_is_refused(write_run, tmp_path, name):
    run = write_run()
    (tmp_path / "empty").mkdir()
    (tmp_path / "of_others").mkdir()
    (tmp_path / "of_others" / "config.yaml").write_text("theme: dark\n")
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(UserError, match=name):
        run_folders([tmp_path / name])
    assert run.is_dir()


def test_nothing_is_deleted_if_one_of_the_runs_is_being_trained(write_run):
    runs = [write_run(seed=0), write_run(seed=1)]
    with RunFolder(runs[1]).lock(), pytest.raises(BusyError, match=f"{runs[1]} is being trained"):
        delete_runs(runs)
    assert all(run.is_dir() for run in runs)
