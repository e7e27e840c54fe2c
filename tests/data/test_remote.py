"""Files behind URLs, without a network: fsspec's memory filesystem, a failing filesystem, and a local web server."""

import gzip
import json
import socket
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO

import fsspec
import fsspec.core
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from simbal.data import files
from simbal.data.prepare import open_source, prepare
from simbal.errors import UserError

CONTENT = b"".join(json.dumps({"text": f"text {n} " * 9}).encode() + b"\n" for n in range(60))
TEXTS = [json.loads(line)["text"].encode() for line in CONTENT.splitlines()]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(files, "RETRY_SECONDS", (0, 0, 0))


class Flaky(fsspec.AbstractFileSystem):
    """Has one file; raises the given failures, then works."""

    protocol = "flaky"
    cachable = False
    failures: list  # exceptions to raise, or numbers of bytes to stop after

    def info(self, path, **_):
        return {"name": path, "size": len(CONTENT), "type": "file"}

    def isdir(self, path):
        return False

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


@pytest.mark.parametrize(("extension", "pack"), [(".jsonl", bytes), (".jsonl.gz", gzip.compress)])
def test_a_remote_file_gives_the_same_documents_as_a_local_one(read_url, memory, extension, pack):
    memory.pipe(f"/folder/a{extension}", pack(CONTENT))
    assert read_url(f"memory://folder/a{extension}") == TEXTS


def test_a_glob_in_a_url_is_expanded_and_sorted(keys, memory):
    for name in ("b", "a", "c"):
        memory.pipe(f"/folder/{name}.jsonl", CONTENT)
    memory.pipe("/folder/notes.md", b"not text of the corpus")
    memory.mkdir("/folder/d.jsonl")
    names = open_source(keys("files", files="memory://folder/*.jsonl")).inputs()
    assert [name[-7:] for name in names] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    for urls, message in {
        "memory://folder/*": "notes.md: .*must end in one of",
        "memory://folder/?.txt": "data.files: no file matches",
    }.items():
        with pytest.raises(UserError, match=message):
            open_source(keys("files", files=urls)).inputs()
    with pytest.raises(UserError, match="b.jsonl .*listed twice"):
        open_source(keys("files", files=["memory://folder/*.jsonl", names[1]])).inputs()


def test_a_prepared_store_is_found_again_without_its_source(keys, memory):
    for url in ("memory://folder/a.jsonl", "memory://folder/*.jsonl"):
        memory.pipe("/folder/a.jsonl", CONTENT)
        data = keys("files", files=url, vocab_size=300, validation_one_in=5)
        store = prepare(data, progress=False)
        memory.rm("/folder/a.jsonl")
        assert prepare(data, progress=False) == store


@pytest.mark.parametrize("failure", [ConnectionResetError("gone"), RuntimeError("of a package"), 1000])
def test_a_lost_connection_or_a_short_copy_is_retried_three_times(read_url, flaky, failure):
    flaky(*[failure] * 3)
    assert read_url("flaky://*.jsonl") == TEXTS * 2
    flaky(*[failure] * 4)
    with pytest.raises(UserError, match="data.files: cannot read flaky://a.jsonl .*set its path"):
        read_url("flaky://a.jsonl")


def test_a_missing_or_forbidden_file_and_an_unknown_protocol_are_not_retried(read_url, flaky):
    flaky(FileNotFoundError(), PermissionError())
    for url in ("flaky://a.jsonl", "flaky://a.jsonl", "nonesuch://host/a.jsonl"):
        with pytest.raises(UserError, match=f"cannot read {url}"):
            read_url(url)


@pytest.fixture
def web(tmp_path):
    """The address of a server of the test's folder."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_compressed_file_of_a_web_server_is_read(read_url, web, tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(CONTENT))
    assert read_url(f"{web}/a.jsonl.gz?download=true") == TEXTS


def test_a_missing_file_or_a_silent_server_does_not_hang(read_url, web, monkeypatch):
    with pytest.raises(UserError, match="cannot read .*missing.jsonl .FileNotFoundError"):
        read_url(f"{web}/missing.jsonl")
    monkeypatch.setattr(files, "HTTP_TIMEOUTS", {"sock_connect": 0.1, "sock_read": 0.1})
    monkeypatch.setattr(files, "RETRY_SECONDS", ())
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(UserError, match="cannot read .*a.jsonl"),
    ):
        read_url(f"http://127.0.0.1:{silent.getsockname()[1]}/a.jsonl")
