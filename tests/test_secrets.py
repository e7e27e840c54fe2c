"""No secret of a URL stands in anything that a run or a sweep leaves behind, and none decides which run it is."""

import json
import os
import threading
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from simbal.report.report import report
from simbal.runs.folder import RunFolder
from simbal.sweep.worker import Assignment
from tests.conftest import SMALL
from tests.programs import run

USER, PASSWORD, TOKEN = "adalovelace", "p4ssw0rd+x", "t0k3n-of-a-server"
TEXTS = "".join(json.dumps({"text": f"document {i} has some words of its own " * 40}) + "\n" for i in range(60))


@pytest.fixture
def server():
    """Gives its one file to who knows the user, the password and the token."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.headers["Authorization"], self.path))
            known = self.headers["Authorization"] == "Basic " + b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            self.send_response(200 if known and f"token={TOKEN}" in self.path else 403)
            self.send_header("Content-Length", str(len(TEXTS)))
            self.end_headers()
            self.wfile.write(TEXTS.encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked = asked
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def address(server, token=TOKEN):
    password = PASSWORD.replace("+", "%2B")
    return f"http://{USER}:{password}@127.0.0.1:{server.server_port}/corpus.jsonl?token={token}"


def small_files(folder, *more):
    keys = ("trainer.max_steps=2", "trainer.val_every=2", "optim.warmup_steps=1", "data.vocab_size=300")
    text = ("data=files", "data.seq_len=16", "data.validation_one_in=4", "data.validation_tokens=512")
    places = (f"output_dir={folder / 'outputs'}", f"data.cache_dir={folder / 'cache'}")
    return [*SMALL, *text, *keys, *places, *more]


def found(secrets, folder, *said):
    """Where one of them stands."""
    places = [
        str(file) for file in folder.rglob("*") if file.is_file() and any(s in file.read_bytes() for s in secrets)
    ]
    places += [str(file) for file in folder.rglob("*") if any(s.decode() in file.name for s in secrets)]
    return places + [text for text in said if any(s.decode() in text for s in secrets)]


SECRETS = [USER.encode(), PASSWORD.encode(), PASSWORD.replace("+", "%2B").encode(), TOKEN.encode()]


@pytest.mark.slow
@pytest.mark.parametrize("given", ["typed", "environment"])
def test_a_sweep_over_a_url_with_secrets_leaves_none_of_them_anywhere(tmp_path, server, given):
    url, environment = address(server), dict(os.environ)
    if given == "environment":
        environment["CORPUS"], url = url, "${oc.env:CORPUS}"
    arguments = small_files(tmp_path, f'data.files="{url}"' if given == "typed" else f"data.files={url}")
    arguments += ["logger=tensorboard", "balancing=simbal,lbl"]
    swept = run("train.py", "-m", *arguments, cwd=tmp_path, **environment)
    assert swept.returncode == 0, swept.stdout + swept.stderr
    assert [path for _, path in server.asked] == [f"/corpus.jsonl?token={TOKEN}"]
    folder = tmp_path / "outputs" / "default"
    assert found(SECRETS, tmp_path, swept.stdout, swept.stderr) == []
    specs = [RunFolder(path.parent).read_spec() for path in folder.glob("*/config.yaml")]
    shown = f"http://***@127.0.0.1:{server.server_port}/corpus.jsonl?token=***"
    assert {spec.config.data.files for spec in specs} == {shown if given == "typed" else "${oc.env:CORPUS}"}
    again = run("train.py", "-m", *arguments, cwd=tmp_path, **environment)
    assert "2 finished, 0 resumed, 0 new" in again.stdout
    report(folder, paper=True)
    assert found(SECRETS, tmp_path, again.stdout, again.stderr) == []


@pytest.mark.slow
def test_a_study_keeps_no_secret_and_searches_no_address(tmp_path, server):
    searched = ["hydra/sweeper=optuna", "name=s", "balancing.simbal.coef=0.1,1", "hydra.sweeper.n_trials=2"]
    arguments = small_files(tmp_path, f'data.files="{address(server)}"')
    ended = run("train.py", "-m", *arguments, *searched, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "outputs" / "s" / "study.db").exists()
    assert found(SECRETS, tmp_path, ended.stdout, ended.stderr) == []
    both = f'data.files="{address(server)}","{address(server, "another")}"'
    refused = run("train.py", "-m", *small_files(tmp_path, both), *searched, cwd=tmp_path)
    assert "a study keeps what it searches, and an address may hold a secret" in refused.stderr
    assert found(SECRETS, tmp_path, refused.stdout, refused.stderr) == []


@pytest.mark.slow
def test_what_goes_wrong_is_told_without_secrets(tmp_path, server):
    wrong = address(server, token="t0k3n-that-is-old")
    secrets = [*SECRETS, b"t0k3n-that-is-old"]
    refused = run("train.py", *small_files(tmp_path, f'data.files="{wrong}"'), cwd=tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr
    assert "access is refused" in refused.stderr
    unknown = run("train.py", *small_files(tmp_path, f'data.files="{wrong}"', "data.nothing=1"), cwd=tmp_path)
    misspelt = run("train.py", *small_files(tmp_path, f'data.fils="{wrong}"'), cwd=tmp_path)
    twice = run("train.py", *small_files(tmp_path, f'data.files=["{wrong}","{wrong}"]'), cwd=tmp_path)
    for end in (unknown, misspelt, twice):
        assert end.returncode in (1, 2)
        assert end.stderr.startswith("error: ")
    ends = (refused, unknown, misspelt, twice)
    assert found(secrets, tmp_path, *(end.stdout + end.stderr for end in ends)) == []


def test_users_and_tokens_do_not_decide_which_run_it_is_and_the_rest_does(small_spec, monkeypatch):
    def hash_of(url):
        return small_spec("data=files", f'data.files="{url}"').hash

    url = "https://ada:pass@host/a.jsonl?token=T&part=3"
    same = ("https://bob:word@host/a.jsonl?token=T&part=3", "https://ada:pass@host/a.jsonl?token=U&part=3")
    assert {hash_of(other) for other in same} == {hash_of(url)}
    others = ("https://ada:pass@host/a.jsonl?token=T&part=4", "https://ada:pass@host2/a.jsonl?token=T&part=3")
    assert len({hash_of(other) for other in (url, *others)}) == 3
    monkeypatch.setenv("URL", url)
    from_environment = small_spec("data=files", "data.files=${oc.env:URL}")
    assert from_environment.config.data.files == url
    assert from_environment.written["data"]["files"] == "${oc.env:URL}"
    monkeypatch.setenv("URL", same[0])
    assert small_spec("data=files", "data.files=${oc.env:URL}").hash == from_environment.hash


def test_the_password_of_a_store_reaches_a_job_and_no_file(small_spec, tmp_path, monkeypatch):
    spec = small_spec("store='s3://lovelace:p4ssw0rd@bucket/runs'")
    RunFolder(spec.path).write_spec(spec)
    assert found([b"lovelace", b"p4ssw0rd"], spec.path) == []
    assert spec.written["store"] == "s3://***@bucket/runs"
    assert Assignment.of(spec, None).read().config.store == "s3://lovelace:p4ssw0rd@bucket/runs"
    assert spec.hash == small_spec().hash
    monkeypatch.setenv("STORE", "s3://lovelace:p4ssw0rd@bucket/runs")
    from_environment = small_spec("store=${oc.env:STORE}")
    assert (from_environment.written["store"], from_environment.config.store) == ("${oc.env:STORE}", spec.config.store)


def test_a_variable_that_decides_the_result_is_saved_by_its_value(small_spec, monkeypatch):
    monkeypatch.setenv("START", "normal")
    spec = small_spec("router.init=${oc.env:START}")
    assert spec.written["router"]["init"] == "normal"
    assert spec.hash == small_spec("router.init=normal").hash != small_spec().hash
