"""A run in a store is one process's: of those that want it one gets it, and a silent holder loses it after a while."""

import os
import time
from dataclasses import replace
from uuid import uuid4

import pytest

from simbal.errors import BusyError, UserError
from simbal.store import lease
from simbal.store.bucket import Bucket, UnreachableError
from simbal.store.history import Entry, History, Stored
from tests.store.machines import Machine


@pytest.fixture
def bucket():
    return Bucket(f"memory://{uuid4().hex}")


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only where somebody sleeps."""

    class Clock:
        now = 1000.0
        slept = ()

        def sleep(self, seconds):
            self.now += seconds
            for waiting in self.slept:
                waiting()

    clock = Clock()
    monkeypatch.setattr("simbal.store.lease.time.monotonic", lambda: clock.now)
    monkeypatch.setattr("simbal.store.stored_run.time.sleep", clock.sleep)
    return clock


def held_elsewhere(bucket):
    """The history of a run that another machine has, and the entry that says so."""
    history = History(bucket, "name/run")
    process = (os.getpid(), "another machine")
    held = Entry(writer="other", free=False, holder="process 7 on far", process=process)
    return history, history.append(held)


def test_a_silent_holder_loses_its_run_after_the_lease_by_the_clock_of_who_waits(bucket, clock, tmp_path):
    history, _ = held_elsewhere(bucket)
    with Machine(tmp_path, bucket).stored.held():
        assert lease.LEASE_SECONDS <= clock.now - 1000 < lease.LEASE_SECONDS + 2 * lease.LOOK_SECONDS
        assert history.last().holder == lease.holder()
    assert history.last().free


def test_a_sign_of_life_keeps_a_run_and_whoever_wants_it_is_told_at_once(bucket, clock, tmp_path):
    history, entry = held_elsewhere(bucket)
    clock.slept = (lambda: bucket.write(history.place(lease.alive("other")), str(clock.now).encode()),)
    with (
        pytest.raises(BusyError, match="name/run is being written by process 7 on far"),
        Machine(tmp_path, bucket).stored.held(),
    ):
        pass
    assert clock.now - 1000 < lease.LEASE_SECONDS
    assert history.last() == entry


def test_who_only_waits_asks_seldom_and_frees_the_run_of_a_silent_holder(bucket, clock, tmp_path, monkeypatch):
    history, _ = held_elsewhere(bucket)
    waiting = Machine(tmp_path, bucket).stored
    monkeypatch.setattr("simbal.store.stored_run.time.monotonic", lambda: clock.now)
    asked = []
    monkeypatch.setattr(
        Bucket, "names", lambda self, folder, names=Bucket.names: asked.append(folder) or names(self, folder)
    )
    while waiting.holder():
        clock.sleep(1.0)
    assert lease.LEASE_SECONDS <= clock.now - 1000 < lease.LEASE_SECONDS + 2 * lease.LOOK_SECONDS
    assert len(asked) < 20
    assert history.last().free


def test_a_run_of_a_process_that_is_gone_from_this_machine_is_free_at_once(bucket, clock, tmp_path):
    history = History(bucket, "name/run")
    gone = Entry(writer="w", free=False, holder="h", process=(2**22 + 1, lease.process()[1]))
    assert lease.process()[1]
    history.append(gone)
    with Machine(tmp_path, bucket).stored.held():
        assert clock.now == 1000


def test_signs_of_life_come_while_the_run_is_held(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "BEAT_SECONDS", 1e-4)  # some come in the moment in which the run is let go
    machine = Machine(tmp_path, bucket)
    for _ in range(20):
        with machine.stored.held():
            place = machine.stored.history.place(lease.alive(machine.stored.history.last().writer))
            signs = set()
            while len(signs) < 3:
                signs.add(bucket.read(place))
                time.sleep(0.001)
        assert not [name for name in machine.stored.history.names() if name.startswith("alive/")]


def test_a_store_that_creates_an_object_twice_is_refused(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(Bucket, "create", lambda self, name, content: self.write(name, content) or True)
    with pytest.raises(UserError, match="ignores If-None-Match"), Machine(tmp_path, bucket).stored.held():
        pass


def test_an_answer_that_was_lost_is_not_taken_for_somebody_elses_entry(bucket, tmp_path, monkeypatch):
    create = Bucket.create
    lost = []

    def answer_lost(self, name, content):
        done = create(self, name, content)
        if name.endswith("00000002.json") and not lost:
            lost.append(name)
            raise UnreachableError("the answer is lost")
        return done

    machine = Machine(tmp_path, bucket)
    with machine.stored.held():
        monkeypatch.setattr(Bucket, "create", answer_lost)
        machine.train(3, "a")
        machine.stored.bring_away()
        assert machine.stored.troubles == ["a checkpoint could not be brought to the store: the answer is lost"]
        machine.train(6, "a")
        machine.stored.bring_away()
        assert machine.stored.history.last().step == 6
    last = machine.stored.history.last()
    assert (last.number, last.free) == (4, True)


def test_an_entry_that_names_places_outside_of_the_run_is_refused(bucket):
    history, entry = held_elsewhere(bucket)
    for path in ("../x", "/etc/x", ".lock", "checkpoints/../../x", "a\0b", ""):
        written = history.append(replace(entry, files={path: Stored("objects/a", 1, "0" * 64)}))
        with pytest.raises(UserError, match="is not what simbal has written"):
            history.last()
        bucket.delete([history.place(f"history/{written.number:08}.json")])
