"""Where no document is held out, as there are so few, the end of each is, and it is said."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simbal.data import builder
from simbal.data.sources.corpus import _cut
from simbal.data.store import prepare
from simbal.data.tokenizer import load_tokenizer
from simbal.errors import UserError

TEXT = "".join(f"Line {number} of a text of one's own, née à l'école.\n" for number in range(100))
SAID = "too few documents to hold one out: the last 10% of each is (data.validation_one_in)"


@pytest.fixture
def mine(keys, tmp_path):
    """The group `data` of a single .txt."""
    (tmp_path / "mine.txt").write_text(TEXT, encoding="utf-8")
    return keys("files", files=str(tmp_path / "mine.txt"), vocab_size=300, validation_one_in=10)


def texts(store, split: str) -> list[str]:
    """The documents of a split, decoded."""
    encoding, ids = load_tokenizer(300, None).encoding, store.tokens(split)
    ends = [0, *map(int, store.document_ends(split))]
    return [encoding.decode(ids[start : end - 1].tolist()) for start, end in pairwise(ends)]


def test_the_end_of_a_single_text_is_held_out_and_it_is_said(mine, capsys):
    store = prepare(mine, progress=False)
    (train,), (validation,) = texts(store, "train"), texts(store, "validation")
    assert train + validation == TEXT
    assert 0 <= len(TEXT.encode()) // 10 - len(validation.encode()) <= 3  # no letter is cut
    assert capsys.readouterr().err == f"{store.path.name}: {SAID}\n"
    assert f"  {SAID}\n" in store.summary()
    assert prepare(mine, progress=False).fingerprints == store.fingerprints
    assert capsys.readouterr().err == ""


def test_of_several_documents_the_end_of_each_is_held_out(keys, jsonl):
    documents = [f"document {number} " * 30 for number in range(3)]
    store = prepare(keys("files", files=str(jsonl(documents)), vocab_size=300, validation_one_in=100), False)
    assert [*map("".join, zip(texts(store, "train"), texts(store, "validation"), strict=True))] == documents


def test_many_documents_are_held_out_whole_and_nothing_is_said(keys, jsonl, capsys):
    store = prepare(
        keys("files", files=str(jsonl([f"text {n}" for n in range(40)])), vocab_size=300, validation_one_in=4), False
    )
    assert "held_out" not in store.meta
    assert store.held_out() == []
    assert capsys.readouterr().err == ""


def test_a_build_that_is_stopped_while_ends_are_held_out_goes_on_with_ends(keys, tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(TEXT + name, encoding="utf-8")
    data = keys("files", files=str(tmp_path / "?.txt"), vocab_size=300, validation_one_in=333)
    whole = prepare(keys("files", files=str(tmp_path / "?.txt"), vocab_size=300, validation_one_in=333), False)
    expected = whole.fingerprints
    whole.path.rename(tmp_path / "whole")
    commit, commits = builder._commit, []

    def stopping(journal, *rest):
        commits.append(journal.ends)
        if commits.count(True) == 2:
            raise KeyboardInterrupt
        commit(journal, *rest)

    monkeypatch.setattr(builder, "_commit", stopping)
    with pytest.raises(KeyboardInterrupt):
        prepare(data, progress=False)
    assert commits == [False] * 3 + [True] * 2
    commits.clear()
    monkeypatch.setattr(
        builder, "_commit", lambda journal, *rest: commits.append(journal.ends) or commit(journal, *rest)
    )
    assert prepare(data, progress=False).fingerprints == expected
    assert commits == [True] * 2  # the first file is not read again


@pytest.mark.parametrize(("text", "one_in"), [("short", 50), (TEXT, 1)])
def test_a_text_without_an_end_to_hold_out_is_refused(keys, jsonl, text, one_in):
    with pytest.raises(UserError, match="falls into the (train|validation) split: give more documents"):
        prepare(keys("files", files=str(jsonl([text])), vocab_size=300, validation_one_in=one_in), progress=False)


@given(text=st.text(min_size=1, max_size=60), parts=st.integers(2, 60))
def test_a_cut_loses_nothing_and_splits_no_letter(text, parts):
    pieces = _cut(text.encode(), parts)
    assert "".join(piece.decode() for piece in pieces) == text
    assert all(pieces)
