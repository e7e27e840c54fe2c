"""The data of a run that may be anybody's: found by their fingerprint, and never where its config sends one."""

import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from simbal.analysis.evaluate import evaluate
from simbal.analysis.trained import DataPlaces, load
from simbal.data.store import find
from simbal.errors import UserError
from simbal.training.run import train
from tests.analysis.text_run import text_spec
from tests.forged_runs import forge
from tests.in_process import run as run_program

QUALITY = {
    "_target_": "simbal.analysis.quality.quality", "tokens": None, "batch_size": 16, "resamples": 20, "seed": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on text, and the folder that its corpus.txt and its cache are in."""
    folder = tmp_path_factory.mktemp("text")
    spec = text_spec(folder, "balancing=simbal")
    train(spec)
    return spec.path, folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it whose config leads to places in tmp_path that are not there."""
    path = shutil.copytree(trained[0], tmp_path / "run")
    forge(path, "data.cache_dir", str(tmp_path / "theirs"))
    forge(path, "data.tokenizer_path", str(tmp_path / "their.tiktoken"))
    return path


@pytest.fixture
def asked():
    """A server, and what it was asked for."""
    paths = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            paths.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/corpus.txt", paths
    server.shutdown()
    server.server_close()


def test_nothing_that_a_runs_config_names_is_fetched_or_created(run, tmp_path, asked):
    url, paths = asked
    forge(run, "data.files", url)
    (tmp_path / "here").mkdir()
    done = run_program(tmp_path / "here", "evaluate.py", f"run={run}", "analysis=[quality,generate]")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: the data of {run} (data=files, tokens ")
    assert f"are not in .cache/data and {tmp_path / 'theirs'}: prepare them by `python prepare.py " in done.stderr
    assert "data.vocab_size=400 data.files=...`, or give data.files= here, or give data.cache_dir= of" in done.stderr
    assert done.stderr.count("\n") == 1
    assert paths == []
    assert {path.name for path in tmp_path.iterdir()} == {"run", "here"}
    assert not [*(tmp_path / "here").iterdir()]


def test_in_the_cache_of_the_run_nothing_is_written(trained, tmp_path):
    run = shutil.copytree(trained[0], tmp_path / "run")
    cache = shutil.copytree(trained[1] / "cache", tmp_path / "theirs")
    for memory in cache.rglob(".*"):
        memory.unlink()
    forge(run, "data.cache_dir", str(cache))
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    evaluate({"quality": QUALITY}, str(run), True, "cpu", "unused", places=DataPlaces(cache_dir=str(tmp_path / "mine")))
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
    assert not (tmp_path / "mine").exists()


def test_text_that_the_user_gives_is_prepared_in_the_users_cache_and_compared(run, trained, tmp_path):
    text, cache = trained[1] / "corpus.txt", tmp_path / "mine"
    forge(run, "data.threads", 10**6)
    places = DataPlaces(cache_dir=str(cache), files=str(text))
    tokens = load(run, "cpu", places).store.fingerprints["tokens"]
    assert find(cache, tokens, remember=False) is not None
    assert not (tmp_path / "theirs").exists()
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join(f"another text {number}" for number in range(200)))
    with pytest.raises(UserError, match=rf"{run} was trained on other data \(tokens {tokens[:12]}\) than data.files="):
        load(run, "cpu", DataPlaces(cache_dir=str(tmp_path / "second"), files=str(other)))


def test_the_tokenizer_of_an_analysis_is_the_users(run, trained, tmp_path):
    keys = ("analysis=generate", "analysis.generate.tokens=4", f"data.cache_dir={trained[1] / 'cache'}")
    done = run_program(tmp_path, "evaluate.py", f"run={run}", *keys)
    assert done.returncode == 0, done.stderr
    done = run_program(tmp_path, "evaluate.py", f"run={run}", *keys, "data.tokenizer_path=mine", "overwrite=true")
    assert done.returncode == 1
    assert "mine" in done.stderr
