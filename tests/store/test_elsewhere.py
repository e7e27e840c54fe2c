"""Runs that go on, are finished and are compared on machines that share nothing but a bucket."""

import json
import shutil
from types import SimpleNamespace

import pytest
import s3fs
from tests.test_secrets import found

from simbal.store.bucket import Bucket
from tests import programs
from tests.child_processes import wait_until
from tests.conftest import MARKOV, SMALL
from tests.store.s3_server import SECRET, everything, serving
from tests.training.run_files import assert_same_run

pytestmark = pytest.mark.slow
LONG = ("name=mine", "trainer.max_steps=60", "trainer.ckpt_every=7", "trainer.val_every=10", "logger=tensorboard")


@pytest.fixture
def server(monkeypatch):
    with serving() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield server
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def machine(tmp_path, cache_dir):
    """`machine("a")`: the folder of a machine, and the arguments of a run on it."""

    def make(name, *more):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        places = (f"output_dir={folder / 'outputs'}", f"data.cache_dir={cache_dir}")
        values = dict(override.split("=", 1) for override in (*SMALL, *MARKOV, *LONG, *places, *more))
        return folder, [f"{key}={value}" for key, value in values.items()]

    return make


def the_run(folder, seed=0):
    (path,) = (folder / "outputs" / "mine").glob(f"*seed{seed}-*")
    return SimpleNamespace(path=path)


def test_a_run_killed_on_one_machine_goes_on_on_another_to_the_same_bits_and_into_one_table(server, machine, tmp_path):
    straight, arguments = machine("straight")
    assert programs.run("train.py", *arguments, cwd=straight).returncode == 0

    store = f"store=s3://{server.bucket}/runs"
    first, arguments = machine("first", store)
    server.fails(r"PUT .*/history/00000004\.json", "hang", 100)  # the third checkpoint
    running = programs.Program("train.py", *arguments, cwd=first)
    wait_until(lambda: server.hanging.is_set() or running.poll() is not None)
    assert running.poll() is None, running.communicate()
    running.kill()
    running.completed()
    server.faults.clear()
    shutil.rmtree(first)

    second, arguments = machine("second", store)
    again = programs.run("train.py", *arguments, cwd=second)
    assert again.returncode == 0, again.stderr
    assert "going on from step 14 of 60" in again.stdout
    assert_same_run(the_run(straight), the_run(second))

    third, arguments = machine("third", store)
    swept = programs.run("train.py", "-m", *arguments, "seed=0,1", cwd=third)
    assert swept.returncode == 0, swept.stdout + swept.stderr
    assert "1 finished, 0 resumed, 1 new" in swept.stdout
    fourth, _ = machine("fourth")
    url = f"s3://{server.bucket}/runs/mine"
    reported = programs.run("report.py", url, cwd=fourth)
    assert reported.returncode == 0, reported.stderr
    tables = [json.loads((folder / "outputs" / "mine" / "table.json").read_text()) for folder in (third, fourth)]
    runs = [[run["values"] for arm in table["arms"] for run in arm["runs"]] for table in tables]
    assert runs[0] == runs[1]
    assert len(runs[0]) == 2
    assert not [*fourth.rglob("*.ckpt")]
    stored = Bucket(f"s3://{server.bucket}")
    assert not [name for name, content in everything(stored).items() if SECRET.encode() in content]
    said = [part for end in (again, swept, reported) for part in (end.stdout, end.stderr)]
    assert found([SECRET.encode()], tmp_path, *said) == []
