"""Folders and unreadable files in the place of a file, and disks that refuse: a sentence each."""

import errno
import os
from pathlib import Path

import pytest

from simbal.data.store import Plan, prepare
from simbal.errors import UserError


@pytest.fixture
def corpus(keys, jsonl):
    return keys(
        "files", files=str(jsonl([f"text {number}" for number in range(40)])), vocab_size=300, validation_one_in=4
    )


@pytest.mark.parametrize("named", ["directly", "by a glob"])
@pytest.mark.parametrize("extension", [".txt", ".jsonl.gz", ".parquet"])
def test_a_folder_is_refused_as_text(keys, tmp_path, named, extension):
    path = tmp_path / f"a{extension}"
    path.mkdir()
    files = str(path) if named == "directly" else f"{tmp_path}/*{extension}"
    with pytest.raises(UserError, match=path.name) as caught:
        prepare(keys("files", files=files), progress=False)
    assert "\n" not in str(caught.value)


def test_what_is_no_store_is_refused_in_its_place(corpus):
    path = Plan.of(corpus).path
    path.mkdir(parents=True)
    with pytest.raises(UserError, match=r"meta.json is damaged: delete .* and prepare it again"):
        prepare(corpus, progress=False)


def refuse(monkeypatch, function, target, number):
    """`Path.open` or `Path.stat` of `target` fails, as for a user who is not root."""
    real = getattr(Path, function)

    def failing(path, *rest, **options):
        if Path(str(path)) == target:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *rest, **options)

    monkeypatch.setattr(Path, function, failing)


@pytest.mark.parametrize("function", ["open", "stat"])
def test_a_text_that_may_not_be_read_is_a_sentence(corpus, monkeypatch, function):
    refuse(monkeypatch, function, Path(corpus.files), errno.EACCES)
    with pytest.raises(UserError, match=r"corpus.jsonl: Permission denied") as caught:
        prepare(corpus, progress=False)
    assert "\n" not in str(caught.value)
    assert "cannot write" not in str(caught.value)
