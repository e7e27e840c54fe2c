"""Prepared data: what decides them, how they are found, verified and checked."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from simbal.config.check import checked_data
from simbal.data import builder, store
from simbal.data.check import prepare_or_check
from simbal.data.sources import files
from simbal.data.sources.synthetic import Symbols
from simbal.data.store import VERIFIED, Plan, Store, find, prepare
from simbal.data.tokenizer import load_tokenizer
from simbal.errors import UserError
from tests.conftest import CONF
from tests.programs import run

REPOSITORY = Path(__file__).parents[2]
BUILDS_WHEN_TOLD = """
import json, sys
from simbal.config.check import checked_data
from simbal.data import store

build = store.build

def told(*arguments):
    print("building", flush=True)
    sys.stdin.readline()
    return build(*arguments)

store.build = told
print(store.prepare(checked_data(json.loads(sys.argv[1])), progress=False).fingerprints["tokens"])
assert "torch" not in sys.modules
"""


@pytest.fixture
def plain(tmp_path, jsonl):
    """`plain(vocab_size=300)`: the group `data` as Hydra composes it, for a corpus of sixty documents."""
    files = yaml.safe_load((CONF / "data" / "files.yaml").read_text())
    path = str(jsonl([f"\x1b]0;title\x07 text number {number} größer" * 30 for number in range(60)]))
    given = {"files": path, "vocab_size": 300, "validation_one_in": 5, "cache_dir": str(tmp_path / "cache")}
    return lambda **changed: {**files, **given, **changed}


@pytest.fixture
def corpus(plain):
    return lambda **changed: checked_data(plain(**changed))


@pytest.fixture
def hashed(monkeypatch):
    """The files that are hashed."""
    names, sha256_of = [], store._sha256_of
    monkeypatch.setattr(store, "_sha256_of", lambda file: names.append(file.name) or sha256_of(file))
    return names


def flip(path, at=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_prepared_corpus_is_opened_and_neither_built_nor_hashed_again(corpus, monkeypatch, hashed):
    first = prepare(corpus(), progress=False)
    monkeypatch.setattr(store, "build", None)
    hashed.clear()
    again = prepare(corpus(seq_len=8, validation_tokens=None, tokenizer_path="/nowhere"), progress=False)
    assert (again.path, again.fingerprints, hashed) == (first.path, first.fingerprints, [])


def test_a_copy_and_a_changed_file_are_hashed_even_with_the_old_size_and_time(corpus, hashed, tmp_path):
    first = prepare(corpus(), progress=False)
    hashed.clear()
    shutil.copytree(first.path, tmp_path / "copied" / first.path.name)  # its memory goes with it
    prepare(corpus(cache_dir=str(tmp_path / "copied")), progress=False)
    assert len(hashed) == 5
    file = first.path / "train/tokens.bin"
    about = file.stat()
    flip(file, 100)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    with pytest.raises(UserError, match="train/tokens.bin is damaged"):
        prepare(corpus(), progress=False)


@pytest.mark.parametrize(
    "file",
    ["train/tokens.bin", "validation/tokens.bin", "train/docs.idx", "validation/docs.idx", "byte_len.bin", "meta.json"],
)
def test_a_flipped_bit_in_any_file_is_refused_in_a_sentence_that_names_it(corpus, file):
    path = prepare(corpus(), progress=False).path
    flip(path / file, 8)
    with pytest.raises(UserError, match=f"^{path / file} is damaged .*delete {path} and prepare it again$"):
        prepare(corpus(), progress=False)


def test_a_folder_that_is_no_store_is_refused(corpus):
    Plan.of(corpus()).path.mkdir(parents=True)
    with pytest.raises(UserError, match="meta.json is damaged"):
        prepare(corpus(), progress=False)


def test_what_decides_the_tokens_decides_the_folder_and_threads_decide_nothing(corpus, jsonl, monkeypatch, tmp_path):
    monkeypatch.setattr(builder, "GROUP", 1000)
    first = prepare(corpus(threads=1), progress=False)
    threads = prepare(corpus(threads=7, cache_dir=str(tmp_path / "other")), progress=False)
    assert threads.fingerprints == first.fingerprints
    vocabulary = prepare(corpus(vocab_size=301), progress=False)
    assert vocabulary.fingerprints["text"] == first.fingerprints["text"]
    assert vocabulary.fingerprints["tokens"] != first.fingerprints["tokens"]
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes((tmp_path / "corpus.jsonl").read_bytes())
    elsewhere = prepare(corpus(files=[str(moved)]), progress=False)
    assert elsewhere.fingerprints == first.fingerprints
    split = prepare(corpus(validation_one_in=3), progress=False)
    jsonl(["another text"] * 3 + [str(number) for number in range(40)])
    other = prepare(corpus(), progress=False)
    assert len({found.path for found in (first, vocabulary, elsewhere, split, other)}) == 5


def test_ids_above_65535_are_kept_in_four_bytes(corpus, jsonl):
    path = str(jsonl([f"{number} unquestionably" for number in range(20)]))
    found = prepare(corpus(files=path, vocab_size=100_277, validation_one_in=4), progress=False)
    assert found.tokens("train").dtype == np.dtype("<u4")
    assert found.tokens("train").max() == found.meta["eot"] == 100_257


def test_an_id_outside_the_vocabulary_is_an_error_and_not_another_id(keys, monkeypatch):
    monkeypatch.setattr(Symbols, "encode", lambda self, content: np.array([70_000], np.uint32))
    with pytest.raises(IndexError):
        prepare(keys("synthetic"), progress=False)


def test_a_store_is_found_by_its_tokens_whatever_lies_beside_it(corpus, tmp_path):
    good = prepare(corpus(), progress=False)
    cache, tokens = good.path.parent, good.fingerprints["tokens"]
    other = prepare(corpus(vocab_size=301), progress=False)
    for name, content in {"a": b"{", "b": b"{}", "c": b"\xff"}.items():
        (cache / name).mkdir()
        (cache / name / "meta.json").write_bytes(content)
    (cache / "f" / "meta.json").mkdir(parents=True)
    assert find(cache, tokens) == good
    assert find(cache, other.fingerprints["tokens"]) == other
    assert find(cache, "0" * 64) is None
    assert find(tmp_path / "absent", tokens) is None
    (good.path / VERIFIED).unlink()
    flip(good.path / "train/docs.idx")
    with pytest.raises(UserError, match="train/docs.idx is damaged"):
        find(cache, tokens)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_disk_that_refuses_is_a_sentence_with_the_key(corpus, monkeypatch, number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(UserError, match=f"{os.strerror(number)}; .*choose another data.cache_dir="):
        prepare(corpus(), progress=False)


def test_text_that_may_not_be_read_is_a_sentence(corpus, monkeypatch):
    def failing(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    data = corpus()
    monkeypatch.setattr(files, "open", failing, raising=False)
    with pytest.raises(UserError, match="^[^\n]*corpus.jsonl: Permission denied$"):
        prepare(data, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["", str(REPOSITORY / "tests/no_flock")], ids=["flock", "without flock"])
def test_two_processes_that_prepare_at_once_make_one_build_without_torch(plain, path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [path, *sys.path]))}

    def start():
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", BUILDS_WHEN_TOLD, json.dumps(plain())]
        return subprocess.Popen(command, env=environment, **pipes)

    with start() as first:
        assert first.stdout.readline() == "building\n"
        with start() as second:
            assert second.stderr.readline().startswith("waiting for another process that prepares files-")
            fingerprint, errors = first.communicate("go on\n")
            assert second.communicate() == (fingerprint, "")  # it has said once that it waits
    assert (errors, first.returncode, second.returncode) == ("", 0, 0)


def test_the_command_prepares_text_and_says_what_it_holds(tmp_path, jsonl):
    train, held_out = jsonl(["one two", "three"]), jsonl(["four"], "held_out.jsonl")
    files = f"data.files={train}", f"data.validation_files={held_out}"
    done = run("prepare.py", f"data.cache_dir={tmp_path}/cache", "data=files", *files, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "train: 2 documents, " in done.stdout
    assert "validation: 1 documents, " in done.stdout
    assert list((tmp_path / "cache").glob("files-*"))


def test_a_finished_preparation_is_checked_on_request(plain, monkeypatch):
    with pytest.raises(UserError, match="nothing is prepared yet.*check=true"):
        prepare_or_check(plain(), True)
    prepare_or_check(plain(), False)
    said = "\n".join(prepare_or_check(plain(), True))
    assert "text number" in said
    assert "\x1b" not in said
    opened = Store.open(Plan.of(checked_data(plain())).path)
    monkeypatch.setattr(Store, "open", lambda *_, **__: changed(opened))
    with pytest.raises(UserError, match="train/tokens.bin: document 0 is tokenized otherwise"):
        prepare_or_check(plain(), True)


def changed(opened):
    """The store with a word of a text in two ids that text would never give."""
    ids = opened.tokens("train").copy()
    ids[:2] = [load_tokenizer(300).encoding.encode_single_token(token) for token in (b"i", b"n")]  # together one id
    object.__setattr__(opened, "tokens", lambda split: ids)
    return opened
