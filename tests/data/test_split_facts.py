from hashlib import sha256

import numpy as np
import pytest

from simbal.data import splits as split_facts
from simbal.data.splits import SplitFacts, facts_of

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


@pytest.mark.parametrize(("dtype", "largest"), [("<u2", 5), ("<u2", 65_535), ("<u4", 4_294_967_295)])
def test_an_id_outside_of_the_vocabulary_is_named_with_its_place(folder, monkeypatch, dtype, largest):
    monkeypatch.setattr(split_facts, "CHUNK", 4)
    path = folder([0, 1, 2, 3, 4, largest, 0], dtype)
    with pytest.raises(ValueError, match=rf"tokens.bin: token 5 is {largest}, outside of the vocabulary of 5 ids"):
        facts_of(path, dtype, BYTE_LEN, EOT)
