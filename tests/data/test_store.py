import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from simbal.data import builder as encode
from simbal.data import store
from simbal.data.sources.synthetic import Symbols
from simbal.data.store import Store, prepare
from simbal.errors import UserError

NO_FLOCK = """
import errno
from simbal.files import locks

def refuse(*_):
    raise OSError(errno.ENOLCK, "No locks available")

locks.fcntl.flock = refuse
"""
BUILDS_WHEN_TOLD = """
import json, sys
from simbal.config.compose import checked_data
from simbal.data import store

build = store.build

def told(*arguments):
    print("building", flush=True)
    sys.stdin.readline()
    build(*arguments)

store.build = told
print(store.prepare(checked_data(json.loads(sys.argv[1])), progress=False).fingerprints["tokens"])
assert "torch" not in sys.modules
"""


@pytest.fixture
def corpus(keys, jsonl):
    path = str(jsonl([f"text number {number} " * 30 for number in range(60)]))
    return keys("files", files=path, vocab_size=300, validation_one_in=5)


@pytest.fixture
def folders(tmp_path):
    return lambda: sorted(path.name for path in (tmp_path / "cache").glob("*") if path.is_dir())


def fail(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_prepared_corpus_is_read_and_not_built_again(corpus, monkeypatch):
    first = prepare(corpus, progress=False)
    monkeypatch.setattr(store, "build", fail)
    again = prepare(
        corpus.model_copy(update={"seq_len": 8, "validation_tokens": None, "tokenizer_path": "/nowhere"}),
        progress=False,
    )
    assert again == first


def test_what_decides_the_tokens_decides_the_folder(corpus, folders, jsonl):
    prepare(corpus, progress=False)
    prepare(corpus.model_copy(update={"vocab_size": 301}), progress=False)
    prepare(corpus.model_copy(update={"validation_one_in": 3}), progress=False)
    jsonl(["another text"] * 3 + [str(number) for number in range(40)])
    prepare(corpus, progress=False)
    assert len(folders()) == 4


def test_fingerprints_do_not_depend_on_names_times_or_compression(corpus, jsonl, tmp_path):
    first = prepare(corpus, progress=False)
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes((tmp_path / "corpus.jsonl").read_bytes())
    second = prepare(corpus.model_copy(update={"files": [str(moved)]}), progress=False)
    assert second.path != first.path
    assert second.fingerprints == first.fingerprints


def test_any_number_of_threads_writes_the_same_bytes(corpus, monkeypatch, tmp_path):
    monkeypatch.setattr(encode, "GROUP", 1000)
    fingerprints = []
    for threads in (1, 7, None):
        store = prepare(
            corpus.model_copy(update={"threads": threads, "cache_dir": str(tmp_path / str(threads))}), progress=False
        )
        fingerprints.append(store.fingerprints)
    assert fingerprints[0] == fingerprints[1] == fingerprints[2]


def test_ids_above_65535_are_kept_in_four_bytes(keys, jsonl):
    texts = [f"{number} unquestionably" for number in range(20)]
    store = prepare(keys("files", files=str(jsonl(texts)), vocab_size=100_277, validation_one_in=4), progress=False)
    assert store.tokens("train").dtype == np.dtype("<u4")
    assert store.tokens("train").max() == store.meta["eot"] == 100_257


def test_an_id_outside_the_vocabulary_is_an_error_and_not_another_id(keys, monkeypatch):
    monkeypatch.setattr(Symbols, "encode", lambda self, content: np.array([70_000], np.uint32))
    with pytest.raises(IndexError):
        prepare(keys("synthetic"), progress=False)


def test_a_damaged_store_is_refused(corpus):
    path = prepare(corpus, progress=False).path
    (path / "train" / "tokens.bin").write_bytes(b"short")
    with pytest.raises(UserError, match="train/tokens.bin is damaged: delete .* and prepare it again"):
        prepare(corpus, progress=False)
    (path / "meta.json").write_text("{}")
    with pytest.raises(UserError, match="meta.json is damaged"):
        Store.open(path)


@pytest.mark.slow
@pytest.mark.parametrize("locking", ["", NO_FLOCK], ids=["flock", "a lease"])
def test_two_processes_that_prepare_at_once_make_one_build_without_torch(corpus, locking):
    def start():
        command = [sys.executable, "-c", locking + BUILDS_WHEN_TOLD, corpus.model_dump_json()]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, **pipes)

    with start() as first:
        assert first.stdout.readline() == "building\n"
        with start() as second:
            assert second.stderr.readline().startswith("waiting for another process that prepares files-")
            fingerprint, errors = first.communicate("go on\n")
            assert second.communicate() == (fingerprint, "")  # it has said once that it waits
    assert (errors, first.returncode, second.returncode) == ("", 0, 0)
