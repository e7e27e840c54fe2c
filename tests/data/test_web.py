"""Files of a web server on this machine: whole, cut short, gone."""

import gzip
import socket
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from simbal.data.sources import remote
from simbal.data.store import open_source
from simbal.errors import UserError
from tests.data.remote_files import CONTENT, TEXTS

pytestmark = pytest.mark.usefixtures("no_pauses")


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(self.path)
        self.server.authorizations.append(self.headers["Authorization"])
        if self.server.cuts:
            self.server.cuts -= 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT[:100])
            return
        super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def web(tmp_path):
    """A server of the folder `web` with its address, the paths asked for and the number of answers to cut."""
    (tmp_path / "web").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path / "web"))
    server.requests, server.authorizations, server.cuts = [], [], 0
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_file_of_a_web_server_is_read_as_it_lies_there(read_url, web, tmp_path):
    (tmp_path / "web/a.jsonl.gz").write_bytes(gzip.compress(CONTENT))
    assert read_url(f"{web.url}/a.jsonl.gz?download=true") == TEXTS
    assert web.requests == ["/a.jsonl.gz?download=true"]


def test_an_answer_of_the_web_that_is_cut_short_is_asked_for_again(read_url, web, tmp_path):
    (tmp_path / "web/a.jsonl").write_bytes(CONTENT)
    web.cuts = 3
    assert read_url(f"{web.url}/a.jsonl") == TEXTS
    web.cuts = 4
    with pytest.raises(
        UserError, match=f"{web.url}/a.jsonl cannot be fetched .*; 4 attempts.*curl -LO '{web.url}/a.jso"
    ):
        read_url(f"{web.url}/a.jsonl")


def test_a_page_that_is_not_there_is_asked_for_once(read_url, web):
    with pytest.raises(
        UserError, match="missing.jsonl cannot be fetched .there is no such file.: fetch it by hand .curl"
    ):
        read_url(f"{web.url}/missing.jsonl")
    assert web.requests == ["/missing.jsonl"]


def test_a_server_that_is_gone_or_never_answers_does_not_hang(read_url, monkeypatch):
    monkeypatch.setattr(remote, "TIMEOUT", (0.1, 0.1))
    monkeypatch.setattr("simbal.data.sources.remote.PAUSES", ())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(UserError, match="a.jsonl cannot be fetched .TimeoutError: timed out; 1 attempts"):
            read_url(f"http://127.0.0.1:{port}/a.jsonl")
    with pytest.raises(UserError, match="a.jsonl cannot be fetched .Connection refused; 1 attempts"):
        read_url(f"http://127.0.0.1:{port}/a.jsonl")


def test_a_glob_of_the_web_is_refused(keys):
    with pytest.raises(UserError, match=r"https://host/\*.jsonl: a web server has no list of files to match"):
        open_source(keys("files", files="https://host/*.jsonl")).units()
