"""A record that is cut short or changed is found out: it is never a result, never code, never a traceback."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simbal.errors import UserError
from simbal.report.collect import collect
from simbal.report.report import report
from simbal.report.table import LastSweep
from simbal.runs import record as record_schema
from simbal.runs.curves import curve, rows
from simbal.runs.folder import DamagedRecordError, RunFolder
from simbal.runs.progress import NUMBERS
from simbal.sweep.attempt import Attempt

WHOLE = {
    "status": "finished", "config_hash": "c" * 64, "choices": {"balancing": "lbl"}, "seed": 3,
    "data": {"tokens": "b", "versions": {"numpy": "2.0"}}, "definitions": {"val/ppl": "exp of the loss"},
    "steps": 400, "tokens": 819_200, "tokens_per_second": 9000.5, "metrics": {"val/ppl": 12.25, "val/max_vio": None},
    "warnings": ["one"],
}  # fmt: skip
TEXT = (json.dumps(record_schema.sealed(WHOLE), indent=1) + "\n").encode()
IN_A_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)
hostile_texts = st.sampled_from(
    [b"", b"null", b"[]", b"{", b"NaN", b"\xff\xfe{}", b'"\\ud800"',
     b'{"__reduce__": ["os.system", ["touch pwned"]]}', b"9" * 5000, b"1e999", b'{"runs": {"a": "\\udfff"}}',
     b'{"command": "x", "runs": {}}{}']
)  # fmt: skip
texts = hostile_texts | st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode())


def parsed(text: bytes):
    try:
        return record_schema.parse_record(text)
    except ValueError:
        return None


@contextmanager
def a_sentence_about(path: Path) -> Iterator[None]:
    """Whatever is refused within is refused by a sentence that names `path`."""
    try:
        yield
    except UserError as error:
        if str(path) not in str(error):
            raise AssertionError(path) from error


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


@given(st.sampled_from([*record_schema.KEYS]), json_values)
def test_a_record_with_any_value_of_a_key_is_refused_or_right(key, value):
    record = {k: v for k, v in (WHOLE | {key: value}).items() if k != "sha256"}
    read = parsed(json.dumps(record).encode())
    if read is not None:
        record_schema.check(read)
        json.dumps(read, allow_nan=False, ensure_ascii=False).encode()


@given(texts)
def test_any_text_is_refused(text):
    assert parsed(text) is None


@given(st.dictionaries(st.text(max_size=5), json_values))
def test_whatever_is_sealed_is_read_again_or_refused(extra):
    try:
        sealed = record_schema.sealed({**{f"x{key}": value for key, value in extra.items()}, **WHOLE})
    except ValueError:  # NaN
        return
    read = record_schema.parse_record(json.dumps(sealed).encode())
    assert {key: read[key] for key in WHOLE} == WHOLE


@IN_A_FOLDER
@given(texts)
def test_reading_a_folder_with_any_record_gives_a_record_or_says_what_to_do(tmp_path, text):
    (tmp_path / "record.json").write_bytes(text)
    folder = RunFolder(tmp_path)
    assert folder.whole_record() is None
    with pytest.raises(DamagedRecordError, match="record.json is damaged .*: give the command that made it again"):
        folder.read_record()
    assert not (tmp_path / "pwned").exists()


@IN_A_FOLDER
@given(text=texts, file=st.sampled_from(["metrics.jsonl", "sweep.json", "progress.json"]))
def test_other_files_of_any_content_are_absent_or_a_sentence(tmp_path, text, file):
    (tmp_path / file).write_bytes(text)
    with a_sentence_about(tmp_path / file):
        rows(tmp_path)
        curve(tmp_path, "val/loss")
        missing = LastSweep.of(tmp_path).never_started(set())
        assert all(isinstance(label, str) for label in missing.values())
    (tmp_path / file).unlink()


@IN_A_FOLDER
@given(json_values | st.fixed_dictionaries(dict.fromkeys(NUMBERS, json_values)))
def test_progress_of_any_content_can_be_shown(tmp_path, said):
    attempt = object.__new__(Attempt)
    attempt.folder = RunFolder(tmp_path)
    (tmp_path / "progress.json").write_text(json.dumps(said))
    shown = attempt.progress()
    assert isinstance(shown, dict)
    assert all(shown.get(key) is None or abs(shown[key]) < float("inf") for key in NUMBERS)


@IN_A_FOLDER
@given(text=texts, file=st.sampled_from(["record.json", "metrics.jsonl", "config.yaml", "analysis/dropping.json"]))
def test_a_table_of_a_folder_with_any_file_in_it_is_made_or_refused_in_a_sentence(write_run, text, file):
    path: Path = write_run("lbl")
    before = {name: (path / name).read_bytes() for name in ("config.yaml", "record.json")}
    (path / "analysis").mkdir(exist_ok=True)
    (path / file).write_bytes(text)
    with a_sentence_about(path):
        (run,) = collect(path.parent)
        assert run.finished or run.damage
        report(path.parent)
    (path / file).unlink()
    for name, content in before.items():
        (path / name).write_bytes(content)


@pytest.mark.parametrize("name", ["record.json", "config.yaml"])
def test_a_folder_in_place_of_a_file_is_a_sentence(write_run, name):
    path = write_run()
    (path / name).unlink()
    (path / name).mkdir()
    with pytest.raises(UserError, match=f"{path / name} cannot be read: Is a directory"):
        collect(path.parent)
