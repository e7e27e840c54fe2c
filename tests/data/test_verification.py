"""Prepared data are believed by what is in them, once for each copy on each machine."""

import json
import shutil

import pytest

from simbal.data import verification
from simbal.data.store import find, prepare
from simbal.data.verification import MEMORY
from simbal.errors import UserError


@pytest.fixture
def corpus(keys, jsonl):
    texts = [f"text number {number}, größer\n" * (1 + number % 7) for number in range(60)]
    return keys("files", files=str(jsonl(texts)), vocab_size=300, validation_one_in=4)


@pytest.fixture
def good(corpus):
    return prepare(corpus, progress=False)


@pytest.fixture
def reads(monkeypatch):
    """The splits that were read, of each verification."""
    splits = []
    facts_of = verification.facts_of

    def noting(folder, *rest):
        splits.append(folder.name)
        return facts_of(folder, *rest)

    monkeypatch.setattr(verification, "facts_of", noting)
    return splits


def flip(path, at=0):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "at"),
    [
        ("train/tokens.bin", 100), ("validation/tokens.bin", 0), ("train/docs.idx", 8), ("validation/docs.idx", 0),
        ("byte_len.bin", 200),
    ],
)  # fmt: skip
def test_a_flipped_bit_in_any_file_is_refused_in_a_sentence_that_names_it(corpus, good, file, at):
    flip(good.path / file, at)
    with pytest.raises(UserError) as caught:
        prepare(corpus, progress=False)
    assert str(caught.value).startswith(f"{good.path / file}: ")
    assert str(caught.value).endswith(f": delete {good.path} and prepare it again")
    assert "\n" not in str(caught.value)


def test_a_store_is_read_once_and_a_copy_of_it_anew(corpus, reads, tmp_path):
    store = prepare(corpus, progress=False)
    assert reads == ["train", "validation"]
    assert prepare(corpus, progress=False) == store
    assert len(reads) == 2
    shutil.copytree(store.path, tmp_path / "copied" / store.path.name)  # its memory goes with it
    copied = prepare(corpus.model_copy(update={"cache_dir": str(tmp_path / "copied")}), progress=False)
    assert (len(reads), copied.meta) == (4, store.meta)


def test_a_store_is_found_by_its_tokens_whatever_lies_beside_it(corpus, good, tmp_path):
    cache, tokens = good.path.parent, good.fingerprints["tokens"]
    other = prepare(corpus.model_copy(update={"vocab_size": 301}), progress=False)
    for name, content in {"a": b"{", "b": b"{}", "c": b"\xff", "d": json.dumps({"fingerprints": 3}).encode()}.items():
        (cache / name).mkdir()
        (cache / name / "meta.json").write_bytes(content)
    (cache / "f" / "meta.json").mkdir(parents=True)
    (cache / "g").symlink_to(cache / "nowhere")
    (cache / "meta.json").touch()
    shutil.copytree(good.path, cache / "0.partial")
    assert find(cache, tokens, remember=True) == good
    assert find(cache, other.fingerprints["tokens"], remember=True) == other
    assert find(cache, "0" * 64, remember=True) is None
    assert find(tmp_path / "absent", tokens, remember=True) is None
    assert not (tmp_path / "absent").exists()


def test_a_store_that_is_found_is_verified_and_nothing_is_written_unless_asked(good):
    (good.path / MEMORY).unlink()
    assert find(good.path.parent, good.fingerprints["tokens"], remember=False) == good
    assert not (good.path / MEMORY).exists()
    flip(good.path / "train/docs.idx")
    with pytest.raises(UserError, match=r"train/docs.idx: document 0 ends at"):
        find(good.path.parent, good.fingerprints["tokens"], remember=False)
    shutil.rmtree(good.path / "train")
    with pytest.raises(UserError, match="train/tokens.bin is damaged"):
        find(good.path.parent, good.fingerprints["tokens"], remember=False)
