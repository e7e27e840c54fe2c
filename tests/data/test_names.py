"""Names of files that no text file can hold, or that look alike."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simbal.config.schema import as_dict
from simbal.data.check import prepare_or_check
from simbal.data.sources.inputs import name_of
from simbal.data.store import prepare

STRANGE = (b"caf\xe9-1", b"caf\xe9-2", rb"caf\xe9-1", rb"caf\\xe9-1", "café-1".encode(), b"CAF\xe9-1", b"a\nb", b"\xff")


@pytest.fixture
def strange(tmp_path, keys):
    """A file of each name, and the keys of a glob that matches them all."""
    folder = tmp_path / os.fsdecode(b"f\xf6lder")
    folder.mkdir()
    for name in STRANGE:
        lines = [json.dumps({"text": f"text {number} of {name!r}"}) + "\n" for number in range(20)]
        (folder / os.fsdecode(name + b".jsonl")).write_text("".join(lines))
    return keys("files", files=f"{tmp_path}/*/*.jsonl", vocab_size=300, validation_one_in=4)


def test_files_of_any_name_are_prepared_and_opened_again(strange):
    store = prepare(strange, progress=False)
    assert prepare(strange, progress=False) == store
    assert prepare_or_check(as_dict(strange), True)
    names = [entry["name"].rpartition("/")[2] for entry in store.meta["inputs"]]
    assert sum(entry["documents"] for entry in store.meta["inputs"]) == 20 * len(STRANGE)
    assert len(set(names)) == len(STRANGE)
    assert rb"caf\xe9-1.jsonl".decode() in names
    assert r"/f\xf6lder/" in store.meta["inputs"][0]["name"]


@given(st.lists(st.sampled_from([b"\\", b"x", b"e", b"9", b"\xe9"]), max_size=8).map(b"".join),
       st.lists(st.sampled_from([b"\\", b"x", b"e", b"9", b"\xe9"]), max_size=8).map(b"".join))  # fmt: skip
def test_no_path_has_the_name_of_another_however_it_is_spelt(one, another):
    assert (name_of("/" + os.fsdecode(one)) == name_of("/" + os.fsdecode(another))) == (one == another)
