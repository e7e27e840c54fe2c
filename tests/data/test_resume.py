"""A build that is killed, starved or stopped by bad input goes on after its last finished input, to the same bytes."""

import errno
import json
import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from simbal.data import builder, store, verification
from simbal.data.splits import SplitWriter
from simbal.data.store import Plan, prepare
from simbal.data.verification import MEMORY
from simbal.errors import UserError
from tests.child_processes import in_a_fork

SIZES = {"vocab_size": 300, "validation_one_in": 5}
PHASES = [
    (builder, "replace_text", 1), (builder, "replace_text", 4), (os, "fsync", 15), (os, "fsync", 9),
    (builder, "shared_windows", 1), (builder, "facts_of", 1), (builder, "facts_of", 2), (builder, "write_meta", 1),
    (Path, "unlink", 5), (Path, "unlink", 7), (Path, "rename", 1),
    (store, "sync", 3), (verification, "verify", 1), (verification, "facts_of", 2), (json, "dumps", 1),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Four files of thirty documents, which no test changes."""
    folder = tmp_path_factory.mktemp("corpus")
    for part in range(4):
        lines = (json.dumps({"text": f"text {number} of part {part} " * 20}) for number in range(30))
        (folder / f"part-{part}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def corpus(keys, files):
    return keys("files", files=str(files / "part-*.jsonl"), **SIZES)


@pytest.fixture(scope="module")
def whole(files, load_keys, tmp_path_factory):
    """What a build that nothing disturbs leaves."""
    data = load_keys("files", tmp_path_factory.mktemp("whole"), files=str(files / "part-*.jsonl"), **SIZES)
    return contents(prepare(data, progress=False).path)


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


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def build_killed_at(corpus, place, name, number, moment) -> int:
    """Build in a fork that is killed before or after the call with this number of what has this name there."""

    def build_and_die():
        function, calls = getattr(place, name), count(1)

        def dying(*arguments, **options):
            last = next(calls) == number
            if last and moment == "before":
                kill_this_process()
            result = function(*arguments, **options)
            if last:
                kill_this_process()
            return result

        setattr(place, name, dying)  # in the fork alone
        prepare(corpus, progress=False)

    return in_a_fork(build_and_die)


@pytest.mark.parametrize(
    "document", [75, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 30, 31, 120))]
)
def test_a_killed_build_goes_on_to_the_same_files(corpus, whole, monkeypatch, document):
    write = SplitWriter.write

    def written(self, *arguments):
        write(self, *arguments)
        for file in self._files:
            file.flush()  # some of it has reached the disk

    with monkeypatch.context() as patch:
        patch.setattr(SplitWriter, "write", written)
        assert build_killed_at(corpus, SplitWriter, "write", document, "after") == -signal.SIGKILL
    begun = Plan.of(corpus).path.with_name(Plan.of(corpus).path.name + ".partial")
    finished = json.loads((begun / "journal.json").read_text())["units"] if document > 30 else []
    assert len(finished) == (document - 1) // 30
    assert contents(prepare(corpus, progress=False).path) == whole
    assert not begun.exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: f"{phase[1]} {phase[2]}")
def test_a_build_killed_in_any_phase_ends_in_the_same_files(corpus, whole, phase, moment):
    assert build_killed_at(corpus, *phase, moment) == -signal.SIGKILL
    assert contents(prepare(corpus, progress=False).path) == whole
    require_nothing_left(corpus)


def require_nothing_left(corpus):
    built = Plan.of(corpus).path
    assert sorted(path.name for path in built.parent.iterdir()) == [f".{built.name}.lock", built.name]
    assert not [path for path in built.rglob("*") if path.name.endswith(".part")]


def test_a_full_disk_keeps_what_is_finished(corpus, stopped, whole):
    with pytest.raises(UserError, match="No space left on device; free some space"):
        stopped(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 70)
    assert contents(prepare(corpus, progress=False).path) == whole


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


def flipped(name: str) -> Callable[[Path], None]:
    """One bit of a file of the build is another one."""

    def flip(partial: Path) -> None:
        content = bytearray((partial / name).read_bytes())
        content[3] ^= 1
        (partial / name).write_bytes(content)

    return flip


FILES = ("train/tokens.bin", "train/docs.idx", "validation/digests.bin", "journal.json")


@pytest.mark.parametrize("damage", [renamed, cut, *map(flipped, FILES)])
def test_what_does_not_fit_is_not_gone_on_with(corpus, stopped, whole, capsys, damage):
    with pytest.raises(KeyboardInterrupt):
        stopped(KeyboardInterrupt(), 70)
    damage(Plan.of(corpus).path.with_name(Plan.of(corpus).path.name + ".partial"))
    assert contents(prepare(corpus, progress=False).path) == whole
    assert "what an interrupted build left does not fit these inputs: starting over" in capsys.readouterr().err
