"""A sweep knows what other machines have done with its runs, leaves them what they are at, and brings away its own."""

import json
from dataclasses import replace

import pytest

from simbal.cli.report import main as report
from simbal.errors import UserError
from simbal.files.disk import write_json
from simbal.runs.folder import RunFolder
from simbal.store.bucket import Bucket, UnreachableError
from simbal.store.history import Entry, History
from simbal.store.many import fetch_runs
from simbal.store.stored_run import StoredRun
from simbal.sweep import resume
from simbal.sweep.attempt import Attempt
from simbal.sweep.composer import Job
from simbal.sweep.resume import launch, plan
from simbal.sweep.worker import Assignment
from tests.run_folders import fake_spec


@pytest.fixture
def store(tmp_path):
    return f"file://{tmp_path}/store"


@pytest.fixture
def elsewhere(base_spec, tmp_path, store):
    """The same run as `write_run()` writes, as the command on a machine with other folders describes it."""

    def make(seed=0, machine="elsewhere"):
        places = {"output_dir": str(tmp_path / machine), "data.cache_dir": f"/{machine}/cache", "store": store}
        return fake_spec(base_spec, tmp_path, "simbal", seed, places)

    return make


@pytest.fixture
def write_stored(write_run, store):
    """Writes a run folder and brings it to the store."""

    def write(**more):
        path = write_run(**more)
        stored = StoredRun(Bucket(store), "fake", RunFolder(path))
        with stored.held():
            pass
        return stored

    return write


def test_what_is_finished_failed_or_begun_elsewhere_is_known_by_a_sweep(elsewhere, write_stored):
    write_stored(seed=0)
    write_stored(seed=1, status="failed", error="no space left")
    write_stored(seed=2, status=None)
    attempts = plan([Job([f"seed={seed}"], elsewhere(seed)) for seed in range(4)], retry_failed=False)
    assert [(attempt.kind, attempt.state) for attempt in attempts] == [
        ("finished", "done"), ("failed", "failed"), ("resumed", "queued"), ("new", "queued"),
    ]  # fmt: skip
    assert attempts[1].error == "no space left"


def test_a_failed_run_is_tried_again_with_what_this_machine_has_for_places(elsewhere, write_stored):
    write_stored(status="failed", error="no space left")
    (attempt,) = plan([Job([], elsewhere())], retry_failed=True)
    assert attempt.claim() is None
    assert attempt.folder.read_record() is None
    config = Assignment.of(attempt.job.spec, None).read().config
    assert (config.data.cache_dir, config.store) == ("/elsewhere/cache", elsewhere().config.store)


def test_a_run_that_another_machine_has_is_left_to_it_until_it_is_done(elsewhere, write_stored, write_run, store):
    (attempt,) = plan([Job([], elsewhere())], retry_failed=False)
    history = History(Bucket(store), f"fake/{attempt.folder.path.name}")
    held = history.append(Entry(writer="other", free=False, holder="process 7 on far"))
    assert attempt.claim() == ("elsewhere", "process 7 on far has it")
    history.append(replace(held, free=True))
    write_stored()
    assert attempt.claim()[0] == "elsewhere"  # it does not ask all the time
    attempt.stored._looked = float("-inf")
    assert attempt.claim() == ("done", "")


def test_a_finished_run_that_the_store_lacks_is_brought_there_or_has_failed(elsewhere, write_run, store, monkeypatch):
    spec = elsewhere(machine="outputs")
    write_run()
    monkeypatch.setattr(resume, "_prepare_data", lambda jobs: {job.spec.path: "b" for job in jobs})
    monkeypatch.setattr(resume, "require_one_table", lambda *_: None)

    def unreachable(*_):
        raise UnreachableError(f"{store} cannot be written: disk full")

    def swept():
        class Console:
            print = staticmethod(lambda *_, **__: None)

        (attempt,) = launch([Job([], spec)], lambda waiting: None, Console())
        return attempt

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "write", unreachable)
        failed = swept()
    assert failed.state == "failed"
    assert "has come to its end, and could not be brought away" in failed.error
    assert RunFolder(spec.path).finished(spec)
    assert swept().state == "done"
    assert Attempt(Job([], spec), "").stored.history.last().finished


def test_a_table_is_made_of_the_runs_in_a_store_without_their_checkpoints(
    write_stored, store, tmp_path, monkeypatch, capsys
):
    for seed in (0, 1):
        path = write_stored(seed=seed).folder.path
        (path / "checkpoints").mkdir()
        (path / "checkpoints" / "final.ckpt").write_bytes(b"weights")
        with StoredRun(Bucket(store), "fake", RunFolder(path)).held():
            pass
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")
    report([f"{store}/fake"])
    said = capsys.readouterr().out
    assert f"fetched: {store}/fake to outputs/fake" in said
    desk = tmp_path / "desk" / "outputs"
    (arm,) = json.loads((desk / "fake" / "table.json").read_text())["arms"]
    assert len(arm["runs"]) == 2
    assert not [*desk.rglob("*.ckpt")]
    fetch_runs(f"{store}/fake", desk, whole=True)
    assert len([*desk.rglob("final.ckpt")]) == 2
    with pytest.raises(UserError, match="holds no runs: give <store>/<name>"):
        fetch_runs(f"{store}/nothing", desk)


def test_what_a_user_has_put_into_a_folder_stays_and_what_an_older_try_has_left_goes(elsewhere, write_stored):
    spec = elsewhere()
    folder = RunFolder(spec.path)
    folder.write_spec(spec)
    (spec.path / "notes.txt").write_text("mine")
    (spec.path / "checkpoints").mkdir()
    (spec.path / "checkpoints" / "step-00000003.ckpt").write_text("older")
    write_json(spec.path / "logger.json", {})
    write_stored()
    Attempt(Job([], spec), "").stored.look()
    assert folder.finished(spec)
    left = {path.name for path in spec.path.rglob("*") if path.is_file()} - {".lock"}
    assert left == {"config.yaml", "record.json", "notes.txt"}
