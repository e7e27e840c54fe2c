"""A prepared data set is found again, verified once per machine, and named by everything that determines it."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from simbal.data import prepare as preparation
from simbal.data import store
from simbal.data.prepare import Plan, prepare, prepare_or_check
from simbal.data.store import VERIFIED, find
from simbal.errors import UserError


@pytest.fixture
def corpus(keys, jsonl):
    """`corpus(vocab_size=300)`: the keys of a corpus of sixty documents."""
    path = str(jsonl([f"\x1b]0;title\x07 text number {number} größer" * 30 for number in range(60)]))
    return lambda **changed: keys("files", **{"files": path, "vocab_size": 300, "validation_one_in": 5, **changed})


@pytest.fixture
def hashed(monkeypatch):
    """The files that are hashed when a store is opened."""
    names, hash_file = [], store.hash_file
    monkeypatch.setattr(store, "hash_file", lambda file: names.append(file.name) or hash_file(file))
    return names


def flip(path, at=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_prepared_corpus_is_neither_built_nor_hashed_again(corpus, monkeypatch, hashed):
    first = prepare(corpus(), progress=False)
    monkeypatch.setattr(preparation, "_build", None)
    again = prepare(corpus(seq_len=8, validation_tokens=None, tokenizer_path="/nowhere"), progress=False)
    assert (again.path, again.fingerprints, hashed) == (first.path, first.fingerprints, [])


def test_a_copy_and_a_changed_file_are_hashed_even_with_the_same_size_and_time(corpus, hashed, tmp_path):
    first = prepare(corpus(), progress=False)
    shutil.copytree(first.path, tmp_path / "copied" / first.path.name)
    prepare(corpus(cache_dir=str(tmp_path / "copied")), progress=False)
    assert len(hashed) == 5
    file = first.path / "train/tokens.bin"
    status = file.stat()
    flip(file, 100)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(UserError, match="train/tokens.bin is damaged"):
        prepare(corpus(), progress=False)


@pytest.mark.parametrize("file", ["validation/tokens.bin", "train/docs.idx", "byte_len.bin", "meta.json"])
def test_a_flipped_bit_in_any_file_is_refused_with_its_name(corpus, file):
    path = prepare(corpus(), progress=False).path
    flip(path / file, 8)
    with pytest.raises(UserError, match=f"^{path / file} is damaged .*delete {path} "):
        prepare(corpus(), progress=False)


def test_what_determines_the_tokens_determines_the_folder(corpus, jsonl, monkeypatch, tmp_path):
    monkeypatch.setattr(preparation, "GROUP_BYTES", 1000)
    first = prepare(corpus(threads=1), progress=False)
    threads = prepare(corpus(threads=7, cache_dir=str(tmp_path / "other")), progress=False)
    assert threads.fingerprints == first.fingerprints
    vocabulary = prepare(corpus(vocab_size=301), progress=False)
    assert vocabulary.fingerprints["text"] == first.fingerprints["text"]
    assert vocabulary.fingerprints["tokens"] != first.fingerprints["tokens"]
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes((tmp_path / "corpus.jsonl").read_bytes())
    elsewhere = prepare(corpus(files=[str(moved)]), progress=False)
    assert elsewhere.fingerprints == first.fingerprints
    split = Plan.of(corpus(validation_one_in=3))
    jsonl(["another text"] * 3 + [str(number) for number in range(40)])
    other = Plan.of(corpus())
    assert len({found.path for found in (first, vocabulary, elsewhere, split, other)}) == 5


def test_ids_above_65535_are_stored_in_four_bytes(corpus, jsonl):
    path = str(jsonl([f"{number} unquestionably" for number in range(20)]))
    found = prepare(corpus(files=path, vocab_size=100_277, validation_one_in=4), progress=False)
    assert found.tokens("train").dtype == np.dtype("<u4")
    assert found.tokens("train").max() == found.meta["eot"] == 100_257


def test_a_store_is_found_by_its_tokens_among_other_folders(corpus, tmp_path):
    good = prepare(corpus(), progress=False)
    cache, tokens = good.path.parent, good.fingerprints["tokens"]
    other = prepare(corpus(vocab_size=301), progress=False)
    for name, content in {"a": b"{", "b": b"{}", "c": b"\xff"}.items():
        (cache / name).mkdir()
        (cache / name / "meta.json").write_bytes(content)
    assert find(cache, tokens) == good
    assert find(cache, other.fingerprints["tokens"]) == other
    assert find(cache, "0" * 64) is None
    assert find(tmp_path / "absent", tokens) is None
    (good.path / VERIFIED).unlink()
    flip(good.path / "train/docs.idx")
    with pytest.raises(UserError, match="train/docs.idx is damaged"):
        find(cache, tokens)


@pytest.mark.parametrize(
    ("method", "code", "message"),
    [
        ("mkdir", errno.ENOSPC, "No space left .*choose another data.cache_dir="),
        ("open", errno.EACCES, "corpus.jsonl cannot be read: Permission denied"),
    ],
)
def test_a_full_disk_and_a_forbidden_file_are_named(corpus, monkeypatch, method, code, message):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    data = corpus()
    monkeypatch.setattr(Path, method, fail)
    with pytest.raises(UserError, match=message):
        [*preparation.open_source(data).read(data.files, None)] if method == "open" else prepare(data, progress=False)


def test_prepared_data_are_verified_on_request(corpus, hashed):
    plain = corpus().model_dump()
    with pytest.raises(UserError, match="no prepared data .*check=true"):
        prepare_or_check(plain, True)
    prepare_or_check(plain, False)
    assert not hashed
    lines = "\n".join(prepare_or_check(plain, True))
    assert len(hashed) == 5
    assert "text number" in lines
    assert "\x1b" not in lines
