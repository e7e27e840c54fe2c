"""Runs in a bucket of S3, whose server fails in the ways that servers do."""

import fsspec
import pytest
import s3fs

from simbal.errors import UserError
from simbal.store.bucket import Bucket
from tests.store.machines import Machine, seen
from tests.store.s3_server import REQUESTS, SECRET, serving

pytestmark = pytest.mark.slow
FINISHED = {
    "status": "finished", "config_hash": "h", "steps": 6, "tokens": 1, "tokens_per_second": 1.0, "metrics": {},
    "definitions": {}, "data": {"tokens": "t"},
}  # fmt: skip


@pytest.fixture
def server(monkeypatch):
    with serving() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("simbal.files.remote.PAUSES", (0.0, 0.0, 0.0))
        monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 2}})
        s3fs.S3FileSystem.clear_instance_cache()
        yield server
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def bucket(server):
    return Bucket(f"s3://{server.bucket}/runs")


@pytest.mark.parametrize("kind", ["slow_down", "unavailable", "reset", "lost", "expired"])
def test_what_fails_in_passing_is_tried_again(tmp_path, server, bucket, kind):
    machine = Machine(tmp_path / "a", bucket)
    with machine.stored.held():
        for step, (name, requests) in enumerate(REQUESTS.items()):
            server.fails(requests, kind)
            machine.train(step, "a")
            machine.stored.bring_away()
            Machine(tmp_path / name, bucket).stored.look()
            assert len(server.struck) == step + 1
    assert machine.stored.troubles == []
    assert seen(tmp_path / "c", bucket) == machine.files()


@pytest.mark.parametrize("kind", ["hang", "continue"])
@pytest.mark.parametrize("asked", ["PUT .*/objects/", "PUT .*/history/"])
def test_a_server_that_does_not_answer_is_given_up_after_a_while_and_asked_again(
    tmp_path, server, bucket, monkeypatch, kind, asked
):
    monkeypatch.setattr("simbal.store.bucket.ANSWER_SECONDS", 10.0)
    machine = Machine(tmp_path / "a", bucket)
    with machine.stored.held():
        server.fails(asked, kind)
        machine.train(3, "a")
        machine.stored.bring_away()
    assert server.struck
    assert machine.stored.troubles == []
    assert seen(tmp_path / "b", bucket) == machine.files()


@pytest.mark.parametrize(("kind", "code"), [("expired", "ExpiredToken"), ("denied", "AccessDenied")])
def test_refused_access_is_warned_of_at_a_checkpoint_and_told_at_the_end(tmp_path, server, bucket, kind, code, capsys):
    machine, before = Machine(tmp_path / "a", bucket), {}

    def train():
        with machine.stored.held():
            machine.train(3, "a")
            machine.stored.bring_away()
            before.update(machine.files())
            server.fails("PUT", kind, 1000)
            machine.train(6, "a")
            machine.stored.bring_away()
            machine.folder.write_record(FINISHED)

    with pytest.raises(UserError, match=f"could not be brought away: .*access is refused .{code}.; the same command"):
        train()
    assert len(machine.stored.troubles) == 1
    assert SECRET not in str(machine.stored.troubles) + "".join(capsys.readouterr())
    server.faults.clear()
    assert seen(tmp_path / "b", bucket) == before
    Machine(tmp_path / "a", bucket).stored.deliver()
    assert seen(tmp_path / "b", bucket) == machine.files()


def test_a_bucket_that_is_not_there_is_named(tmp_path, server):
    held = Machine(tmp_path, Bucket("s3://another/runs")).stored.held()
    with pytest.raises(UserError, match="s3://another/runs cannot be written: there is no such bucket"):
        held.__enter__()
