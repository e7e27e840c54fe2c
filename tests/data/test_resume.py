"""A build that is killed, starved or stopped by bad input goes on after its last finished input, to the same bytes."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simbal.data.files import Files
from simbal.data.split_writer import SplitWriter
from simbal.data.store import Plan, prepare
from simbal.errors import UserError

DIES = """
import json, os, sys
from simbal.data import split_writer, store

keys, last = json.loads(sys.argv[1]), int(sys.argv[2])
write, written = split_writer.SplitWriter.write, 0

def dying(self, *document):
    global written
    write(self, *document)
    written += 1
    if written == last:
        for file in (self._tokens, self._ends, self._digests):
            file.flush()  # some of it has reached the disk
        os._exit(9)

split_writer.SplitWriter.write = dying
store.prepare(keys, progress=False)
"""


@pytest.fixture
def corpus(keys, jsonl):
    """Four files of thirty documents."""
    for part in range(4):
        jsonl([f"text {number} of part {part} " * 20 for number in range(30)], f"part-{part}.jsonl")
    folder = jsonl(["unused"]).parent
    return keys("files", files=str(folder / "part-*.jsonl"), vocab_size=300, validation_one_in=5)


@pytest.fixture
def whole(corpus, tmp_path):
    return contents(prepare({**corpus, "cache_dir": str(tmp_path / "whole")}, progress=False).path)


def contents(folder) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def stopped(corpus, monkeypatch):
    """`stopped(error, document)`: prepare, with `error` after this many documents."""

    def stop(error: BaseException, document: int) -> None:
        write, written = SplitWriter.write, []

        def dies(self, *arguments):
            write(self, *arguments)
            written.append(arguments)
            if len(written) == document:
                raise error

        with monkeypatch.context() as patch:
            patch.setattr(SplitWriter, "write", dies)
            prepare(corpus, progress=False)

    return stop


@pytest.mark.parametrize("document", [1, 30, 31, 75, 120])
def test_a_killed_build_goes_on_to_the_same_files(corpus, whole, document):
    killed = subprocess.run([sys.executable, "-c", DIES, json.dumps(corpus), str(document)], check=False)
    assert killed.returncode == 9
    partial = Plan.of(corpus).path.with_name(Plan.of(corpus).path.name + ".partial")
    finished = json.loads((partial / "journal.json").read_text())["units"] if document > 30 else []
    assert len(finished) == (document - 1) // 30
    assert contents(prepare(corpus, progress=False).path) == whole
    assert not partial.exists()


def test_what_is_finished_is_not_read_again(corpus, stopped, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        stopped(KeyboardInterrupt(), 70)
    read, units = Files.read, []

    def noting(self, unit, *rest):
        units.append(Path(unit).name)
        return read(self, unit, *rest)

    monkeypatch.setattr(Files, "read", noting)
    prepare(corpus, progress=False)
    assert units == ["part-2.jsonl", "part-3.jsonl"]


def test_a_full_disk_keeps_what_is_finished(corpus, stopped, whole):
    with pytest.raises(UserError, match="No space left on device: free some space"):
        stopped(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 70)
    assert contents(prepare(corpus, progress=False).path) == whole


def test_a_bad_input_keeps_what_was_finished_before_it(corpus, jsonl):
    jsonl([], "part-2.jsonl").write_bytes(b"no json")
    with pytest.raises(UserError, match=r"part-2.jsonl, line 1: .*\nrun it again to continue after input 2 of 4"):
        prepare(corpus, progress=False)
    with pytest.raises(UserError, match="continue after input 2 of 4"):
        prepare(corpus, progress=False)


def test_nothing_stays_of_a_build_that_has_finished_no_input(corpus, stopped):
    with pytest.raises(KeyboardInterrupt):
        stopped(KeyboardInterrupt(), 5)
    assert [path.name for path in Plan.of(corpus).path.parent.iterdir() if path.is_dir()] == []


def test_a_build_stopped_while_it_was_finishing_goes_on(corpus, whole, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("simbal.data.builder.facts_of", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(corpus, progress=False)
    assert contents(prepare(corpus, progress=False).path) == whole


def renamed(partial: Path) -> None:
    journal = partial / "journal.json"
    journal.write_text(journal.read_text().replace("part-3", "part-4"))


def cut(partial: Path) -> None:
    os.truncate(partial / "train" / "tokens.bin", 10)


@pytest.mark.parametrize("damage", [renamed, cut])
def test_what_does_not_fit_is_not_gone_on_with(corpus, stopped, whole, capsys, damage):
    with pytest.raises(KeyboardInterrupt):
        stopped(KeyboardInterrupt(), 70)
    damage(Plan.of(corpus).path.with_name(Plan.of(corpus).path.name + ".partial"))
    assert contents(prepare(corpus, progress=False).path) == whole
    assert "what an interrupted build left does not fit these inputs: starting over" in capsys.readouterr().err
