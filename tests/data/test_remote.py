"""Files behind URLs, without a network: fsspec's memory, and a filesystem that fails."""

import gzip
import json
from io import BytesIO

import fsspec
import fsspec.core
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from simbal.data.store import open_source, prepare
from simbal.errors import UserError
from tests.data.remote_files import CONTENT, TEXTS

pytestmark = pytest.mark.usefixtures("no_pauses")


class Flaky(fsspec.AbstractFileSystem):
    """Holds one file; fails as often as it is told, and then works."""

    protocol = "flaky"
    cachable = False
    failures: list  # exceptions to raise, or numbers of bytes to stop after

    def info(self, path, **_):
        return {"name": path, "size": len(CONTENT), "type": "file"}

    def open(self, path, mode="rb", **_):
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, Exception):
            raise failure
        return BytesIO(CONTENT[:failure])

    def glob(self, path, **_):
        with self.open(path):
            return {"flaky://b.jsonl": {"type": "file"}, "flaky://a.jsonl": {"type": "file"}}


@pytest.fixture
def memory():
    yield MemoryFileSystem()
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def flaky(monkeypatch):
    fsspec.register_implementation("flaky", Flaky, clobber=True)

    def fail(*failures):
        monkeypatch.setattr(Flaky, "failures", [*failures], raising=False)

    return fail


def in_parquet(content):
    file = BytesIO()
    pq.write_table(pa.table({"text": [json.loads(line)["text"] for line in content.splitlines()]}), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("extension", "pack"), [(".jsonl", bytes), (".jsonl.gz", gzip.compress), (".parquet", in_parquet)]
)
def test_a_remote_file_gives_the_same_documents_as_a_local_one(read_url, memory, texts, extension, pack):
    memory.pipe(f"/folder/a{extension}", pack(CONTENT))
    assert read_url(f"memory://folder/a{extension}") == TEXTS
    assert texts(f"a{extension}", pack(CONTENT))[0] == [text.decode() for text in TEXTS]


def test_a_glob_in_a_url_stands_for_files_by_name(keys, memory):
    for name in ("b", "a", "c"):
        memory.pipe(f"/folder/{name}.jsonl", CONTENT)
    memory.pipe("/folder/notes.md", b"no text of the corpus")
    memory.mkdir("/folder/d.jsonl")
    units = open_source(keys("files", files="memory://folder/*.jsonl")).units()
    assert [unit[-7:] for unit in units] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    with pytest.raises(UserError, match="notes.md: the name must end in one of"):
        open_source(keys("files", files="memory://folder/*")).units()
    with pytest.raises(UserError, match="data.files: no file matches memory://folder/.[.]txt"):
        open_source(keys("files", files="memory://folder/?.txt")).units()
    with pytest.raises(UserError, match="b.jsonl: the file is given twice"):
        open_source(keys("files", files=["memory://folder/*.jsonl", units[1]])).units()


def test_a_prepared_store_is_found_again_without_its_source(keys, memory, tmp_path):
    memory.pipe("/folder/a.jsonl", CONTENT)
    for url in ("memory://folder/a.jsonl", "memory://folder/*.jsonl"):
        memory.pipe("/folder/a.jsonl", CONTENT)
        data = keys("files", files=url, vocab_size=300, validation_one_in=5)
        store = prepare(data, progress=False)
        assert store.meta["inputs"][0]["name"].endswith("folder/a.jsonl")
        memory.rm("/folder/a.jsonl")
        assert prepare(data, progress=False) == store


@pytest.mark.parametrize("failure", [ConnectionResetError("gone"), TimeoutError(), RuntimeError("of a package"), 1000])
def test_a_dropped_connection_is_tried_again_three_times(read_url, flaky, failure):
    flaky(failure, failure, failure)
    assert read_url("flaky://a.jsonl") == TEXTS
    flaky(*[failure] * 4)
    with pytest.raises(
        UserError, match="^flaky://a.jsonl cannot be fetched .*; 4 attempts.: fetch it by hand and give"
    ):
        read_url("flaky://a.jsonl")


def test_a_short_copy_is_told_by_the_size_that_was_announced(read_url, flaky):
    flaky(*[1000] * 4)
    with pytest.raises(UserError, match=f"cannot be fetched .1000 bytes came instead of {len(CONTENT)}; 4 attempts"):
        read_url("flaky://a.jsonl")


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [(FileNotFoundError(), "there is no such file"), (PermissionError(), "access is refused")],
)
def test_what_another_attempt_would_not_change_stops_at_once(read_url, flaky, failure, sentence):
    flaky(failure)
    with pytest.raises(UserError, match=f"flaky://a.jsonl cannot be fetched .{sentence}."):
        read_url("flaky://a.jsonl")
