"""A build that is killed, starved or stopped by bad input resumes after its last finished input, to the same bytes."""

import errno
import json
import os
import shutil
import signal
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simbal.data import builder, store
from simbal.data.builder import SplitWriter
from simbal.data.sources.files import Files, cut_end
from simbal.data.store import VERIFIED, prepare
from simbal.data.tokenizer import load_tokenizer
from simbal.errors import UserError
from tests.child_processes import in_a_fork

SIZES = {"vocab_size": 300, "validation_one_in": 5}
KILLS = [
    (SplitWriter, "write", 1), (SplitWriter, "write", 75), (builder, "_sync", 1), (builder, "_sync", 9),
    (builder, "_sync", 15), (store, "shared_windows", 1), (store, "_sha256_of", 3), (Path, "unlink", 1),
    (Path, "unlink", 2), (store, "sync", 3), (Path, "rename", 1),
]  # fmt: skip
TEXT = "".join(f"Line {number} of a text of one's own, née à l'école.\n" for number in range(100))


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """A few documents are encoded at once, and each finished file is committed."""
    monkeypatch.setattr(builder, "GROUP", 5000)
    monkeypatch.setattr(builder, "COMMIT_SECONDS", 0)


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
def whole(corpus, files):
    """What a build that nothing disturbs leaves."""
    built = prepare(corpus, progress=False).path
    found = contents(built)
    shutil.rmtree(built)
    return found


def contents(folder) -> dict[str, bytes]:
    """All files but the memory of when they were verified, which is of times and places."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != VERIFIED]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def die_at(place, name, number, moment, end):
    """Let the call with this number of what has this name `end` the build, before or after it is done."""
    function, calls = getattr(place, name), count(1)

    def dying(*arguments, **options):
        is_last = next(calls) == number
        if is_last and moment == "before":
            end()
        result = function(*arguments, **options)
        if is_last:
            end()
        return result

    return pytest.MonkeyPatch().setattr(place, name, dying)


@pytest.mark.parametrize("moment", ["before", pytest.param("after", marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", KILLS, ids=lambda place: f"{place[1]} {place[2]}")
def test_a_build_killed_anywhere_ends_in_the_same_files(corpus, whole, place, moment):
    def build_and_die():
        die_at(*place, moment, lambda: os.kill(os.getpid(), signal.SIGKILL))  # in the fork alone
        prepare(corpus, progress=False)

    assert in_a_fork(build_and_die) == -signal.SIGKILL
    built = prepare(corpus, progress=False).path
    assert contents(built) == whole
    assert sorted(path.name for path in built.parent.iterdir()) == [f".{built.name}.lock", built.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_finished_files_are_not_read_again(corpus, whole, monkeypatch, error):
    write, written = SplitWriter.write, count(1)

    def failing(*arguments):
        write(*arguments)
        if next(written) == 70:
            raise error

    monkeypatch.setattr(SplitWriter, "write", failing)
    with pytest.raises((KeyboardInterrupt, UserError)):
        prepare(corpus, progress=False)
    read, units = Files.read, []
    monkeypatch.setattr(Files, "read", lambda self, unit, *rest: units.append(unit[-12:]) or read(self, unit, *rest))
    assert contents(prepare(corpus, progress=False).path) == whole
    assert units == ["part-2.jsonl", "part-3.jsonl"]


def test_a_bad_file_keeps_what_was_finished_before_it(corpus, files):
    (files / "part-2.jsonl").write_bytes(b"no json")
    for _ in range(2):
        with pytest.raises(UserError, match=r"part-2.jsonl, line 1: .*\n.*continue after input 2 of 4"):
            prepare(corpus, progress=False)


def test_a_file_that_changes_while_it_is_read_stops(corpus, files, monkeypatch, tmp_path):
    read = Files.read

    def read_then_change(self, *arguments):
        yield from read(self, *arguments)
        (files / "part-0.jsonl").write_text('{"text": "other text"}')

    monkeypatch.setattr(Files, "read", read_then_change)
    with pytest.raises(UserError, match="data.source=files changed while it was read"):
        prepare(corpus, progress=False)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def texts(built, split: str) -> list[str]:
    encoding, ids = load_tokenizer(300).encoding, built.tokens(split)
    ends = [0, *map(int, built.document_ends(split))]
    return [encoding.decode(ids[start : end - 1].tolist()) for start, end in pairwise(ends)]


def test_the_end_of_each_of_few_texts_is_held_out_and_it_is_said(keys, tmp_path, capsys, monkeypatch):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(TEXT + name, encoding="utf-8")
    data = keys("files", files=str(tmp_path / "?.txt"), vocab_size=300, validation_one_in=333)
    commit, commits = builder.Journal.commit, count(1)

    def interrupted(*arguments):
        commit(*arguments)
        if next(commits) == 6:  # while ends are held out
            raise KeyboardInterrupt

    monkeypatch.setattr(builder.Journal, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(data, progress=False)
    built = prepare(data, progress=False)
    assert [*map("".join, zip(texts(built, "train"), texts(built, "validation"), strict=True))] == [
        TEXT + name for name in "abc"
    ]
    said = "the last 0.3% of each is (data.validation_one_in)"
    assert said in capsys.readouterr().err
    assert said in built.summary()


@pytest.mark.parametrize(("text", "one_in"), [("short", 50), (TEXT, 1)])
def test_a_text_without_an_end_to_hold_out_is_refused(keys, jsonl, text, one_in):
    with pytest.raises(
        UserError, match="(train|validation) split: .*data.validation_files or .*data.validation_one_in"
    ):
        prepare(keys("files", files=str(jsonl([text])), vocab_size=300, validation_one_in=one_in), progress=False)


@given(text=st.text(min_size=1, max_size=60), parts=st.integers(2, 60))
def test_a_cut_loses_nothing_and_splits_no_character(text, parts):
    pieces = cut_end(text.encode(), parts)
    assert "".join(piece.decode() for piece in pieces) == text
    assert all(pieces)
