from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simbal.data import splits as split_facts
from simbal.data.splits import SplitFacts, facts_of, token_chunks

BYTE_LEN = np.array([1, 2, 4, 8, 0], np.uint16)
EOT = 4


@pytest.fixture
def folder(tmp_path):
    def write(ids, dtype="<u2", ends=(1,)):
        np.array(ids, dtype).tofile(tmp_path / "tokens.bin")
        np.array(ends, "<u8").tofile(tmp_path / "docs.idx")
        return tmp_path

    return write


def test_facts_are_those_of_a_split_counted_by_hand(folder):
    ids = [0, 0, 1, 4, 3, 4]
    facts, fault = facts_of(folder(ids, ends=[4, 6]), "<u2", BYTE_LEN, EOT)
    digest = sha256(b"\0\0\0\0\1\0\4\0\3\0\4\0").hexdigest()
    ends = sha256(b"\4" + bytes(7) + b"\6" + bytes(7)).hexdigest()
    assert facts == SplitFacts(documents=2, tokens=6, bytes=12, sha256=digest, distinct_ids=4, ends_sha256=ends)
    assert not fault


@given(ids=st.lists(st.integers(0, 4), max_size=30), chunk=st.integers(1, 40), dtype=st.sampled_from(["<u2", "<u4"]))
def test_facts_do_not_depend_on_how_much_is_read_at_once(tmp_path_factory, ids, chunk, dtype):
    path = tmp_path_factory.mktemp("split")
    np.array(ids, dtype).tofile(path / "tokens.bin")
    true_ends = [place + 1 for place, number in enumerate(ids) if number == EOT]
    np.array(true_ends, "<u8").tofile(path / "docs.idx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_facts, "CHUNK", chunk)
        facts, fault = facts_of(path, dtype, BYTE_LEN, EOT)
        chunks = list(token_chunks(path / "tokens.bin", dtype))
    assert [number for part in chunks for number in part] == ids
    assert facts.tokens == len(ids)
    assert facts.documents == len(true_ends)
    assert bool(fault) == (ids[-1:] not in ([], [EOT]))  # no more than what follows the last end of text
    assert facts.bytes == sum(int(BYTE_LEN[number]) for number in ids)
    assert facts.distinct_ids == len(set(ids))
    assert facts.sha256 == sha256((path / "tokens.bin").read_bytes()).hexdigest()


def test_the_bytes_of_a_long_split_do_not_wrap_around(folder):
    length = 70_000
    facts = facts_of(folder(np.full(length, 1)), "<u2", np.array([1, 65_535], np.uint16), eot=0)[0]
    assert facts.bytes == 65_535 * length > 1 << 32


@pytest.mark.parametrize(("dtype", "largest"), [("<u2", 5), ("<u2", 65_535), ("<u4", 4_294_967_295)])
def test_an_id_outside_of_the_vocabulary_is_named_with_its_place(folder, monkeypatch, dtype, largest):
    monkeypatch.setattr(split_facts, "CHUNK", 4)
    path = folder([0, 1, 2, 3, 4, largest, 0], dtype)
    with pytest.raises(ValueError, match=rf"tokens.bin: token 5 is {largest}, outside of the vocabulary of 5 ids"):
        facts_of(path, dtype, BYTE_LEN, EOT)
