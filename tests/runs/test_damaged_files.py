"""A record that is cut short or changed is never a result, and a broken file of a run is named in a sentence."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simbal.errors import UserError
from simbal.report.collect import collect
from simbal.runs import record as record_schema
from simbal.runs.folder import DamagedRecordError, RunFolder

WHOLE = {
    "status": "finished", "config_hash": "c" * 64, "choices": {"balancing": "lbl"}, "seed": 3,
    "data": {"tokens": "b", "versions": {"numpy": "2.0"}}, "definitions": {"val/ppl": "exp of the loss"},
    "steps": 400, "tokens": 819_200, "tokens_per_second": 9000.5, "metrics": {"val/ppl": 12.25, "val/max_vio": None},
    "warnings": ["one"],
}  # fmt: skip
TEXT = (json.dumps(record_schema.sealed(WHOLE), indent=1) + "\n").encode()


def parsed(text: bytes):
    try:
        return record_schema.parse_record(text)
    except ValueError:
        return None


def test_what_was_written_is_what_is_read():
    assert record_schema.parse_record(TEXT) == WHOLE


def test_a_record_that_is_cut_short_anywhere_is_damaged():
    for length in range(len(TEXT)):
        cut = TEXT[:length]
        assert parsed(cut) == (WHOLE if cut.strip() == TEXT.strip() else None), length


@given(st.integers(1, 255))
def test_a_record_with_any_byte_changed_is_damaged_or_says_the_same(change):
    for place in range(len(TEXT)):
        changed = bytearray(TEXT)
        changed[place] ^= change
        assert parsed(bytes(changed)) in (None, WHOLE), place  # the same: a space became a line break


@pytest.mark.parametrize("change", [{"steps": "many"}, {"metrics": {"val/ppl": "low"}}, {"status": "done"}])
def test_a_record_with_a_value_of_another_kind_is_damaged(change):
    assert parsed(json.dumps(record_schema.sealed(WHOLE | change)).encode()) is None


@pytest.mark.parametrize("text", [b"", b"null", b"[]", b"{", b"\xff\xfe{}", b"{}", b"1e999"])
def test_a_folder_with_another_text_for_a_record_says_what_to_do(tmp_path, text):
    (tmp_path / "record.json").write_bytes(text)
    folder = RunFolder(tmp_path)
    assert folder.whole_record() is None
    with pytest.raises(DamagedRecordError, match="record.json is damaged .*: give the command that made it again"):
        folder.read_record()


@pytest.mark.parametrize("name", ["record.json", "config.yaml"])
def test_a_folder_in_place_of_a_file_is_a_sentence(write_run, name):
    path = write_run()
    (path / name).unlink()
    (path / name).mkdir()
    with pytest.raises(UserError, match=f"{path / name} cannot be read: Is a directory"):
        collect(path.parent)
