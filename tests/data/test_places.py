"""Folders, pipes, devices, links and unreadable files in the place of a file: a sentence each, and no waiting."""

import errno
import os
from collections import Counter
from pathlib import Path

import pytest

from simbal.data import tokenizer as token_table
from simbal.data.builder import Journal
from simbal.data.store import Plan, open_source, prepare
from simbal.data.verification import FILES
from simbal.errors import UserError

THINGS = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a dangling link": lambda path: path.symlink_to(path.parent / "nowhere"),
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.fixture
def corpus(keys, jsonl):
    return keys(
        "files", files=str(jsonl([f"text {number}" for number in range(40)])), vocab_size=300, validation_one_in=4
    )


@pytest.mark.parametrize("make", THINGS.values(), ids=THINGS)
@pytest.mark.parametrize("named", ["directly", "by a glob"])
@pytest.mark.parametrize("extension", [".txt", ".jsonl.gz", ".parquet"])
def test_what_is_no_file_is_refused_as_text(keys, tmp_path, make, named, extension):
    path = tmp_path / f"a{extension}"
    make(path)
    files = str(path) if named == "directly" else f"{tmp_path}/*{extension}"
    with pytest.raises(UserError, match=path.name) as caught:
        prepare(keys("files", files=files), progress=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["a pipe", "a folder"])
def test_what_takes_the_place_of_a_text_after_it_was_looked_at_is_refused(corpus, make):
    source = open_source(corpus)
    (unit,) = source.units()
    Path(unit).unlink()
    make(Path(unit))
    with pytest.raises(UserError, match="corpus.jsonl: "):
        list(source.read(unit, Counter()))


@pytest.mark.parametrize("make", THINGS.values(), ids=THINGS)
@pytest.mark.parametrize("file", FILES)
def test_what_is_no_file_is_refused_in_a_store(corpus, make, file):
    store = prepare(corpus, progress=False)
    (store.path / file).unlink()
    make(store.path / file)
    with pytest.raises(UserError) as caught:
        prepare(corpus, progress=False)
    assert str(caught.value) == f"{store.path / file} is damaged: delete {store.path} and prepare it again"


@pytest.mark.parametrize("make", [Path.touch, *THINGS.values()], ids=["a file", *THINGS])
def test_what_is_no_store_is_refused_in_its_place(corpus, make):
    path = Plan.of(corpus).path
    path.parent.mkdir()
    make(path)
    with pytest.raises(UserError, match=r"meta.json is damaged: delete .* and prepare it again"):
        prepare(corpus, progress=False)


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, THINGS["a device"], THINGS["a dangling link"]])
@pytest.mark.parametrize("suffix", [".partial", ".lock"])
def test_what_is_in_the_way_of_a_build_is_told(corpus, make, suffix):
    path = Plan.of(corpus).path
    path.parent.mkdir()
    way = path.with_name(f"{path.name}.partial" if suffix == ".partial" else f".{path.name}.lock")
    make(way)
    if make is Path.touch and suffix == ".lock":
        prepare(corpus, progress=False)
        return
    with pytest.raises(UserError, match=r"cannot write .*; choose another data.cache_dir=") as caught:
        prepare(corpus, progress=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", THINGS.values(), ids=THINGS)
@pytest.mark.parametrize("file", ["journal.json", "meta.json", "train", "byte_len.bin"])
def test_what_lies_in_the_way_of_an_interrupted_build_is_cleared(corpus, make, file):
    partial = Plan.of(corpus).path.with_name(f"{Plan.of(corpus).path.name}.partial")
    partial.mkdir(parents=True)
    make(partial / file)
    assert Journal.read(partial).units == []
    prepare(corpus, progress=False)


def refuse(monkeypatch, function, target, number):
    """`os.open` or `Path.stat` of `target` fails, as for a user who is not root."""
    module = os if function == "open" else Path
    real = getattr(module, function)

    def failing(path, *rest, **options):
        if Path(str(path)) == target:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *rest, **options)

    monkeypatch.setattr(module, function, failing)


@pytest.mark.parametrize("function", ["open", "stat"])
def test_a_text_that_may_not_be_read_is_a_sentence(corpus, monkeypatch, function):
    refuse(monkeypatch, function, Path(corpus.files), errno.EACCES)
    with pytest.raises(UserError, match=r"corpus.jsonl: Permission denied") as caught:
        prepare(corpus, progress=False)
    assert "\n" not in str(caught.value)
    assert "cannot write" not in str(caught.value)


@pytest.mark.parametrize("file", ["meta.json", "train/tokens.bin"])
def test_a_file_of_a_store_that_may_not_be_read_is_not_called_damaged(corpus, monkeypatch, file):
    store = prepare(corpus, progress=False)
    refuse(monkeypatch, "open" if file == "meta.json" else "stat", store.path / file, errno.EACCES)
    with pytest.raises(UserError) as caught:
        prepare(corpus, progress=False)
    assert str(caught.value) == f"{store.path / file} cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free some space, or choose another data.cache_dir="),
        (errno.EDQUOT, "free some space, or choose another data.cache_dir="),
        (errno.EACCES, "choose another data.cache_dir="),
        (errno.EROFS, "choose another data.cache_dir="),
        (errno.ENOTDIR, "choose another data.cache_dir="),
    ],
)
def test_the_advice_on_a_disk_fits_what_is_wrong_with_it(corpus, monkeypatch, number, advice):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(UserError) as caught:
        prepare(corpus, progress=False)
    assert str(caught.value) == f"cannot write {Plan.of(corpus).path}: {os.strerror(number)}; {advice}"


@pytest.mark.parametrize(("make", "what"), [
    (os.mkfifo, "it is no regular file"), (THINGS["a device"], "it is no regular file"),
    (Path.mkdir, "Is a directory"), (THINGS["a dangling link"], "not found"),
])  # fmt: skip
def test_what_is_no_file_is_no_token_table(tmp_path, make, what):
    make(tmp_path / "table")
    with pytest.raises(UserError, match=rf"table +{what}"):
        token_table.read_token_table(str(tmp_path / "table"))


def test_a_home_that_nobody_has_is_a_sentence(keys):
    for data in (
        keys("files", files="~nobody-of-this-name/a.txt"),
        keys("dclm", location="~nobody-of-this-name/{shard}.jsonl"),
    ):
        with pytest.raises(UserError, match="~nobody-of-this-name"):
            open_source(data).identity()
