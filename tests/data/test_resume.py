"""A build that is killed, starved or stopped by bad input goes on after its last finished input, to the same bytes."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from simbal.config.schema import as_dict
from simbal.data.sources.files import Files
from simbal.data.splits import SplitWriter
from simbal.data.store import Plan, prepare
from simbal.data.verification import MEMORY
from simbal.errors import UserError

DIES = """
import json, os, sys
from simbal.config.check import checked_data
from simbal.data import splits, store

keys, last = json.loads(sys.argv[1]), int(sys.argv[2])
write, written = splits.SplitWriter.write, 0

def dying(self, *document):
    global written
    write(self, *document)
    written += 1
    if written == last:
        for file in self._files:
            file.flush()  # some of it has reached the disk
        os._exit(9)

splits.SplitWriter.write = dying
store.prepare(checked_data(keys), progress=False)
"""

DIES_AT = """
import importlib, json, os, signal, sys
from simbal.config.check import checked_data
from simbal.data import store

keys, module, names, number, moment = json.loads(sys.argv[1])
target = importlib.import_module(module)
*path, name = names.split(".")
for step in path:
    target = getattr(target, step)
function, calls = getattr(target, name), 0

def dying(*arguments, **options):
    global calls
    calls += 1
    if calls == number and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = function(*arguments, **options)
    if calls == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(target, name, dying)
store.prepare(checked_data(keys), progress=False)
"""
DIES_ANYWHERE = """
import json, os, signal, sys
from simbal.config.check import checked_data
from simbal.data import store, tokenizer

keys, last = json.loads(sys.argv[1])
events = 0

def count(*_):
    global events
    events += 1
    if events == last:
        os.kill(os.getpid(), signal.SIGKILL)

tokenizer.load_tokenizer(300)  # takes most of the time, and writes nothing
data = checked_data(keys)
sys.setprofile(count)
store.prepare(data, progress=False)
sys.setprofile(None)
print(events)
"""
PHASES = [
    ("simbal.data.builder", "replace_text", 1), ("simbal.data.builder", "replace_text", 4),
    ("os", "fsync", 15), ("os", "fsync", 9),
    ("simbal.data.builder", "shared_windows", 1), ("simbal.data.builder", "facts_of", 1),
    ("simbal.data.builder", "facts_of", 2), ("simbal.data.builder", "write_meta", 1),
    ("pathlib", "Path.unlink", 5), ("pathlib", "Path.unlink", 7), ("pathlib", "Path.rename", 1),
    ("simbal.data.store", "sync", 3), ("simbal.data.verification", "verify", 1),
    ("simbal.data.verification", "facts_of", 2), ("simbal.data.verification", "json.dumps", 1),
]  # fmt: skip


@pytest.fixture
def corpus(keys, jsonl):
    """Four files of thirty documents."""
    for part in range(4):
        jsonl([f"text {number} of part {part} " * 20 for number in range(30)], f"part-{part}.jsonl")
    folder = jsonl(["unused"]).parent
    return keys("files", files=str(folder / "part-*.jsonl"), vocab_size=300, validation_one_in=5)


@pytest.fixture
def whole(corpus, tmp_path):
    return contents(prepare(replace(corpus, cache_dir=str(tmp_path / "whole")), progress=False).path)


def contents(folder) -> dict[str, bytes]:
    """All files but the memory of when they were verified, which is of times and places."""
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != MEMORY]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


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
    killed = subprocess.run([sys.executable, "-c", DIES, json.dumps(as_dict(corpus)), str(document)], check=False)
    assert killed.returncode == 9
    partial = Plan.of(corpus).path.with_name(Plan.of(corpus).path.name + ".partial")
    finished = json.loads((partial / "journal.json").read_text())["units"] if document > 30 else []
    assert len(finished) == (document - 1) // 30
    assert contents(prepare(corpus, progress=False).path) == whole
    assert not partial.exists()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: f"{phase[1]} {phase[2]}")
def test_a_build_killed_in_any_phase_ends_in_the_same_files(corpus, whole, phase, moment):
    killed = subprocess.run([sys.executable, "-c", DIES_AT, json.dumps([as_dict(corpus), *phase, moment])], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert contents(prepare(corpus, progress=False).path) == whole
    require_nothing_left(corpus)


def test_a_build_killed_again_and_again_anywhere_ends_in_the_same_files(corpus, whole, tmp_path):
    def run(keys, last):
        command = [sys.executable, "-c", DIES_ANYWHERE, json.dumps([as_dict(keys), last])]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    undisturbed = run(replace(corpus, cache_dir=str(tmp_path / "undisturbed")), 0)
    assert undisturbed.returncode == 0, undisturbed.stderr
    draw, ended = random.Random(0), []
    for _ in range(8):
        ended.append(run(corpus, draw.randrange(1, int(undisturbed.stdout))).returncode)
    assert ended.count(-signal.SIGKILL) >= 3
    assert contents(prepare(corpus, progress=False).path) == whole
    require_nothing_left(corpus)


def require_nothing_left(corpus):
    store = Plan.of(corpus).path
    assert sorted(path.name for path in store.parent.iterdir()) == [f".{store.name}.lock", store.name]
    assert not [path for path in store.rglob("*") if path.name.endswith(".part")]


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
    with pytest.raises(UserError, match="No space left on device; free some space"):
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
