"""Files of a web server on this machine: whole, cut short, gone."""

import base64
import gzip
import socket
import threading
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from simbal.config.schema import as_dict
from simbal.data.check import prepare_or_check
from simbal.data.sources import remote
from simbal.data.store import open_source, prepare
from simbal.errors import UserError
from simbal.files.remote import LostError
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
    monkeypatch.setattr("simbal.files.remote.PAUSES", ())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(UserError, match="a.jsonl cannot be fetched .TimeoutError: timed out; 1 attempts"):
            read_url(f"http://127.0.0.1:{port}/a.jsonl")
    with pytest.raises(UserError, match="a.jsonl cannot be fetched .Connection refused; 1 attempts"):
        read_url(f"http://127.0.0.1:{port}/a.jsonl")


def test_a_glob_of_the_web_is_refused(keys):
    with pytest.raises(UserError, match=r"https://host/\*.jsonl: a web server has no list of files to match"):
        open_source(keys("files", files="https://host/*.jsonl")).units()


def with_secrets(web, user="anna", password="p4ssw0rd", token="T0KEN", part="7"):
    return f"http://{user}:{password}@{web.url.removeprefix('http://')}/a.jsonl?token={token}&part={part}"


SECRETS = ("anna", "p4ssw0rd", "T0KEN")


def test_no_secret_of_a_url_is_written_or_shown_and_the_server_gets_all(keys, web, tmp_path, capfd):
    (tmp_path / "web/a.jsonl").write_bytes(CONTENT)
    data = keys("files", files=with_secrets(web), vocab_size=300, validation_one_in=4)
    store = prepare(data, progress=True)
    assert web.requests == ["/a.jsonl?token=T0KEN&part=7"]
    assert web.authorizations == ["Basic " + base64.b64encode(b"anna:p4ssw0rd").decode()]
    (name,) = {entry["name"] for entry in store.meta["inputs"]}
    assert name.startswith(f"http://***@{web.url.removeprefix('http://')}/a.jsonl?token=***&part=***")
    assert store.meta["source"]["files"] == [["train", name]]
    written = [str(path) for path in (tmp_path / "cache").rglob("*")]
    written += [path.read_text(errors="replace") for path in (tmp_path / "cache").rglob("*.json")]
    written += [*capfd.readouterr(), store.summary(), *prepare_or_check(as_dict(data), True)]
    assert not [text for text in written if any(secret in text for secret in SECRETS)]


def test_urls_that_differ_in_their_secrets_alone_are_one_input(keys, web, tmp_path):
    (tmp_path / "web/a.jsonl").write_bytes(CONTENT)
    common = {"vocab_size": 300, "validation_one_in": 4}
    first = prepare(keys("files", files=with_secrets(web), **common), progress=False)
    others = {"user": "b", "password": "another", "token": "renewed"}
    assert prepare(keys("files", files=with_secrets(web, **others), **common), progress=False) == first
    assert len(web.requests) == 1
    assert prepare(keys("files", files=with_secrets(web, part="8"), **common), progress=False).path != first.path
    assert len(web.requests) == 2
    with pytest.raises(UserError, match="is given twice"):
        prepare(keys("files", files=[with_secrets(web), with_secrets(web, **others)], **common), progress=False)


def test_a_build_goes_on_with_a_new_token(keys, web, tmp_path):
    (tmp_path / "web/a.jsonl").write_bytes(CONTENT)
    missing = tmp_path / "web/b.jsonl"
    common = {"vocab_size": 300, "validation_one_in": 4}
    urls = [with_secrets(web), with_secrets(web).replace("a.jsonl", "b.jsonl")]
    with pytest.raises(
        UserError, match="there is no such file.*\nrun it again to continue after input 1 of 2"
    ) as caught:
        prepare(keys("files", files=urls, **common), progress=False)
    (journal,) = (tmp_path / "cache").rglob("journal.json")
    assert not [secret for secret in SECRETS if secret in journal.read_text() + str(caught.value)]
    missing.write_bytes(CONTENT)
    renewed = [url.replace("T0KEN", "N3W") for url in urls]
    prepare(keys("files", files=renewed, **common), progress=False)
    assert web.requests[2:] == ["/b.jsonl?token=N3W&part=7"]


def test_what_packages_say_of_a_url_holds_no_secret(web, monkeypatch):
    url = with_secrets(web)
    for said in (
        f"500 Server Error for url: {url}",
        "HTTPConnectionPool(host='h', port=1): Max retries exceeded with url: /a.jsonl?token=T0KEN&part=7",
        f"{'x' * (199 - len('http://anna:p4ssw0rd'))} {url}",
    ):
        told = str(LostError.by(RuntimeError(said), url))
        assert told.startswith("RuntimeError: ")
        assert not [secret for secret in SECRETS if secret in told], told


def test_the_sentence_on_a_shard_holds_no_secret(keys, web):
    for place in ("{shard}/a.jsonl?token=T0KEN", "a{shard}.jsonl?token=T0KEN"):
        location = f"http://anna:p4ssw0rd@{web.url.removeprefix('http://')}/{place}"
        source = open_source(keys("dclm", location=location, num_shards=1))
        assert not [secret for secret in SECRETS if secret in str(source.identity()) + str(source.units())]
        with pytest.raises(UserError, match="cannot be fetched .there is no such file") as caught:
            list(source.read(source.units()[0], Counter()))
        assert not [secret for secret in SECRETS if secret in str(caught.value)], caught.value
        assert 'data.location="DIR/' in str(caught.value)
        assert "token" not in str(caught.value).split("data.location=")[1]
    assert web.requests == ["/0/a.jsonl?token=T0KEN", "/a0.jsonl?token=T0KEN"]
    assert web.authorizations[0] == "Basic " + base64.b64encode(b"anna:p4ssw0rd").decode()
