import json
from hashlib import sha256

import numpy as np
import pytest

from simbal.data import check as check_module
from simbal.data import splits as split_facts
from simbal.data.check import check
from simbal.data.document import SPLITS
from simbal.data.store import Store, prepare
from simbal.data.tokenizer import load_tokenizer
from simbal.errors import UserError
from simbal.runs import record as record_schema

ESCAPE = "\x1b]0;title\x07"


@pytest.fixture
def good(keys, jsonl):
    """A store of text at 300 ids, with more documents than the sample takes."""
    texts = [f"{ESCAPE} text number {number}, größer\n" * (1 + number % 7) for number in range(250)]
    return prepare(keys("files", files=str(jsonl(texts)), vocab_size=300, validation_one_in=4), progress=False)


@pytest.fixture
def refused(good):
    """`refused("train/docs.idx", "...")`: `good` is opened and checked again, and the sentence names file and fault."""

    def refuse(file, what):
        with pytest.raises(UserError) as caught:
            check(Store.open(good.path), None)
        assert str(caught.value).startswith(f"{good.path / file}: ")
        assert what in str(caught.value)
        assert str(caught.value).endswith(f": delete {good.path} and prepare it again")

    return refuse


def change(path, dtype, at, value):
    """Replace one number of a binary file."""
    numbers = np.fromfile(path, dtype)
    numbers[at] = value
    numbers.tofile(path)


def edit(store, value, *keys):
    """Replace one entry of `meta.json`, its checksum too; None removes it."""
    meta = json.loads((store.path / "meta.json").read_text())
    entry = meta
    for key in keys[:-1]:
        entry = entry[key]
    entry[keys[-1]] = value
    if value is None:
        del entry[keys[-1]]
    (store.path / "meta.json").write_text(json.dumps(record_schema.sealed(meta)))


def state_anew(store, split):
    """Let `meta.json` say of the tokens what they are now, as if they had been written so."""
    dtype, eot = store.meta["dtype"], store.meta["eot"]
    facts = {split: split_facts.facts_of(store.path / split, dtype, store.byte_len, eot)[0] for split in SPLITS}
    for name in ("sha256", "bytes", "distinct_ids"):
        edit(store, getattr(facts[split], name), "splits", split, name)
    lines = [*(f"{name} {fact.sha256}" for name, fact in facts.items()), f"vocab_size {store.meta['vocab_size']}"]
    edit(store, sha256("\n".join(lines).encode()).hexdigest(), "fingerprints", "tokens")


def test_a_good_store_passes_and_its_figures_are_named(good):
    lines = check(Store.open(good.path), None)
    counts = good.meta["splits"]["train"]
    assert lines[0].startswith(f"checked train: {counts['documents']} documents")
    assert f" {counts['tokens']:,} tokens, {counts['bytes']:,} bytes" in lines[0]
    assert f"{counts['distinct_ids']} distinct ids, sha256 {counts['sha256'][:12]}" in lines[0]
    assert f"decoded 100 of {counts['documents']} train documents" in lines


def test_a_flipped_token_is_found(good, refused):
    tokens = good.path / "validation" / "tokens.bin"
    change(tokens, "<u2", 3, 77)
    refused("validation/tokens.bin", f"its sha256 is {sha256(tokens.read_bytes()).hexdigest()}, but ")


def test_a_token_above_the_vocabulary_is_found(good, refused):
    change(good.path / "train" / "tokens.bin", "<u2", 5, 300)
    refused("train/tokens.bin", "token 5 is 300, outside of the vocabulary of 300 ids")


@pytest.mark.parametrize("shift", [1, -1])
def test_a_shifted_document_end_is_found(good, refused, shift):
    ends = good.document_ends("train")
    stated, true = int(ends[2]) + shift, int(ends[2])
    change(good.path / "train" / "docs.idx", "<u8", 2, stated)
    refused("train/docs.idx", f"document 2 ends at {stated}, but its end of text at {true}")


def test_an_end_of_text_that_moved_is_found_though_the_hash_is_right(good, refused):
    end = int(good.document_ends("train")[1])
    ids = good.tokens("train")[:end]
    change(good.path / "train" / "tokens.bin", "<u2", slice(end - 2, end), ids[:-3:-1])
    state_anew(good, "train")
    refused("train/docs.idx", f"document 1 ends at {end}, but its end of text at {end - 1}")


@pytest.mark.parametrize(
    ("first_two", "what"),
    [([b"\xff", b"a"], "is no text"), ([b"i", b"n"], "is not what its text gives today")],  # together one id
)
def test_text_that_was_written_wrongly_is_found_though_all_figures_are_right(
    good, refused, monkeypatch, first_two, what
):
    monkeypatch.setattr(check_module, "SAMPLE", 1000)  # all of them
    ids = [load_tokenizer(300).encoding.encode_single_token(token) for token in first_two]
    change(good.path / "train" / "tokens.bin", "<u2", slice(2), ids)
    state_anew(good, "train")
    refused("train/tokens.bin", f"document 0 {what}")
