"""A preparation that is killed, interrupted or stopped by bad input resumes and writes the same bytes."""

import errno
import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simbal.data import prepare as preparation
from simbal.data.files import Files, cut_end
from simbal.data.prepare import Plan, SplitWriter, prepare
from simbal.data.store import VERIFIED
from simbal.data.tokenizer import SymbolEncoder
from simbal.errors import UserError
from simbal.runs.atomic import lock
from tests.child_processes import in_a_fork, wait_until
from tests.data.conftest import decode
from tests.in_process import run

SIZES = {"vocab_size": 300, "validation_one_in": 5}
KILLS = [
    (SplitWriter, "write", 75), (SplitWriter, "sync", 3), (Path, "replace", 2), (preparation, "shared_windows", 1),
    (Path, "unlink", 6), (preparation, "sync_to_disk", 3), (Path, "rename", 1),
]  # fmt: skip
TEXT = "".join(f"Line {number} of a text of one's own, née à l'école.\n" for number in range(100))


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """A few documents are encoded at once, and each finished file is committed."""
    monkeypatch.setattr(preparation, "GROUP_BYTES", 5000)
    monkeypatch.setattr(preparation, "COMMIT_SECONDS", 0)


@pytest.fixture
def files(tmp_path):
    """Four files of thirty documents."""
    for part in range(4):
        lines = (json.dumps({"text": f"text {number} of part {part} " * 20}) for number in range(30))
        (tmp_path / f"part-{part}.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.fixture
def corpus(keys, files):
    return keys("files", files=str(files / "part-*.jsonl"), **SIZES)


@pytest.fixture
def expected(corpus):
    """The files of an undisturbed preparation, which are then removed."""
    built = prepare(corpus, progress=False).path
    found = contents(built)
    shutil.rmtree(built)
    return found


def contents(folder) -> dict[str, bytes]:
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != VERIFIED]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def kill_at(place, name, number, moment):
    """Kill this process before or after the call with this number of the function `name`."""
    function, calls = getattr(place, name), count(1)

    def dying(*arguments, **options):
        is_last = next(calls) == number
        if is_last and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **options)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    pytest.MonkeyPatch().setattr(place, name, dying)


@pytest.mark.parametrize("moment", ["before", pytest.param("after", marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", KILLS, ids=lambda place: f"{place[1]} {place[2]}")
def test_a_preparation_killed_anywhere_resumes_to_the_same_files(corpus, expected, place, moment):
    def build_and_die():
        kill_at(*place, moment)  # in the fork only
        prepare(corpus, progress=False)

    assert in_a_fork(build_and_die) == -signal.SIGKILL
    built = prepare(corpus, progress=False).path
    assert contents(built) == expected
    assert sorted(path.name for path in built.parent.iterdir()) == [f".{built.name}.lock", built.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_finished_files_are_not_read_again(corpus, expected, monkeypatch, error):
    write, written = SplitWriter.write, count(1)

    def failing(*arguments):
        write(*arguments)
        if next(written) == 70:
            raise error

    monkeypatch.setattr(SplitWriter, "write", failing)
    with pytest.raises((KeyboardInterrupt, UserError)):
        prepare(corpus, progress=False)
    read, names = Files.read, []
    monkeypatch.setattr(Files, "read", lambda self, name, *rest: names.append(name[-12:]) or read(self, name, *rest))
    assert contents(prepare(corpus, progress=False).path) == expected
    assert names == ["part-2.jsonl", "part-3.jsonl"]


def test_input_that_changes_while_it_is_read_is_an_error(corpus, files, monkeypatch, tmp_path):
    read = Files.read

    def read_then_change(self, *arguments):
        yield from read(self, *arguments)
        (files / "part-0.jsonl").write_text('{"text": "other text"}')

    monkeypatch.setattr(Files, "read", read_then_change)
    with pytest.raises(UserError, match="changed while it was read"):
        prepare(corpus, progress=False)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_with_few_texts_the_end_of_each_is_held_out_and_reported(keys, tmp_path, capsys, monkeypatch):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(TEXT + name, encoding="utf-8")
    data = keys("files", files=str(tmp_path / "?.txt"), vocab_size=300, validation_one_in=333)
    sync, calls = SplitWriter.sync, count(1)

    def interrupted(*arguments):
        sync(*arguments)
        if next(calls) == 9:  # while ends are held out
            raise KeyboardInterrupt

    monkeypatch.setattr(SplitWriter, "sync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(data, progress=False)
    built = prepare(data, progress=False)
    joined = [*map("".join, zip(decode(built, "train"), decode(built, "validation"), strict=True))]
    assert joined == [TEXT + name for name in "abc"]
    assert "the last 0.3% of each (data.validation_one_in)" in capsys.readouterr().err
    assert "the last 0.3% of each (data.validation_one_in)" in built.summary()


@pytest.mark.parametrize(("text", "one_in"), [("short", 50), (TEXT, 1)])
def test_a_text_too_short_for_a_validation_split_is_refused(keys, jsonl, text, one_in):
    data = keys("files", files=str(jsonl([text])), vocab_size=300, validation_one_in=one_in)
    with pytest.raises(UserError, match="(train|validation) split .*data.validation_files .*data.validation_one_in"):
        prepare(data, progress=False)


@given(text=st.text(min_size=1, max_size=60), parts=st.integers(2, 60))
def test_holding_out_an_end_loses_nothing_and_splits_no_character(text, parts):
    pieces = cut_end(text.encode(), parts)
    assert "".join(piece.decode() for piece in pieces) == text
    assert all(pieces)


def test_an_id_outside_the_vocabulary_is_an_error_and_not_another_id(keys, monkeypatch):
    monkeypatch.setattr(SymbolEncoder, "encode", lambda self, content: np.array([70_000], np.uint32))
    with pytest.raises(IndexError):
        prepare(keys("synthetic", documents=2), progress=False)


def test_a_second_process_waits_until_the_first_has_prepared(corpus, capsys):
    path = Plan.of(corpus).path
    path.parent.mkdir()
    with ThreadPoolExecutor() as pool:
        with lock(path.with_name(f".{path.name}.lock")):
            second = pool.submit(prepare, corpus, progress=False)
            wait_until(lambda: "waiting for another process" in capsys.readouterr().err)
            assert not path.exists()
        assert second.result().path == path


def test_the_command_prepares_text_and_prints_a_summary(tmp_path, jsonl):
    files = f"data.files={jsonl(['one two', 'three'])}", f"data.validation_files={jsonl(['four'], 'held-out.jsonl')}"
    done = run(tmp_path, "prepare.py", f"data.cache_dir={tmp_path}/cache", "data=files", *files)
    assert done.returncode == 0, done.stderr
    assert "train: 2 documents, " in done.stdout
    assert "validation: 1 documents, " in done.stdout
    assert list((tmp_path / "cache").glob("files-*"))
