"""A run in a store is seen as it was or as it is, never a mix, wherever a process is killed, paused or overtaken."""

from itertools import count
from uuid import uuid4

import pytest

from simbal.errors import BusyError
from simbal.store.bucket import Bucket
from tests.store.machines import CutBucket, DeadBucket, Killed, Machine, seen


@pytest.fixture
def url():
    return f"memory://{uuid4().hex}"


@pytest.fixture
def no_patience(monkeypatch):
    """A holder that is silent when it is looked at is taken for dead at once, and no disk is waited for."""
    monkeypatch.setattr("simbal.store.fetching.sync", lambda path: None)
    monkeypatch.setattr("simbal.store.lease.LEASE_SECONDS", 0.0)


def stored(machine, *steps, by="a"):
    """Train on a machine with what it has of the run in the store; return the states that it brought there."""
    states = []
    with machine.stored.held():
        for step in steps:
            machine.train(step, by)
            machine.stored.bring_away()
            states.append(machine.files())
    return states


def assert_tidy(machine):
    """The store has the objects that the last entry needs, and no other."""
    history = machine.stored.history
    assert {name for name in history.names() if not name.startswith("history/")} == history.last().objects


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_any_operation_leaves_the_old_state_or_the_new_one(tmp_path, url, no_patience, after):
    cuts = 0
    for at in count(1):
        place = tmp_path / str(at)
        before = stored(Machine(place / "first", Bucket(f"{url}/{at}")), 3)
        doomed = Machine(place / "a", DeadBucket(f"{url}/{at}", at, after))
        states = [*before]
        try:
            with doomed.stored.held():
                for step in (6, 9):
                    doomed.train(step, "a")
                    states.append(doomed.files())
                    doomed.stored.bring_away()
        except Killed:
            cuts += 1
        else:
            break
        whole = Bucket(f"{url}/{at}")
        found = seen(place / "reader", whole)
        assert found in states, at
        following = Machine(place / "b", whole)
        assert stored(following, 12, by="b") == [following.files()]
        assert following.files()["metrics.jsonl"] == found["metrics.jsonl"] + "12 b\n"
        assert seen(place / "reader", whole) == following.files()
        assert_tidy(following)
    assert cuts > 20


@pytest.mark.parametrize("after", [False, True])
def test_who_is_overtaken_at_any_operation_adds_nothing_to_what_came_after(tmp_path, url, no_patience, after):
    overtaken = 0
    for at in count(1):
        place, whole = tmp_path / str(at), Bucket(f"{url}/{at}")
        thief = Machine(place / "b", whole)
        cut = CutBucket(f"{url}/{at}", at, after, lambda thief=thief: stored(thief, 12, by="b"))
        slow, lost = Machine(place / "a", cut), False
        try:
            stored(slow, 3, 6, 9)
        except BusyError:
            lost = True
        if cut.count < at:
            break
        found = seen(place / "reader", whole)
        if lost:
            overtaken += 1
            assert found == thief.files()
        else:
            assert found in (thief.files(), slow.files())
        last = Machine(place / "c", whole)
        stored(last, 15, by="c")
        assert seen(place / "reader", whole) == last.files()
        assert_tidy(last)
    assert overtaken > 15


def test_a_checkpoint_in_shards_gives_way_to_a_file_and_one_that_is_gone_leaves_no_folder(tmp_path, url):
    first, second = (Machine(tmp_path / name, Bucket(url)) for name in "ab")
    stored(first, 2, 4)
    for step in (1, 2):
        checkpoint = second.folder.path / "checkpoints" / f"step-{step:08}.ckpt"
        checkpoint.mkdir(parents=True)
        for name in ("rest.ckpt", "shard-00000.ckpt"):
            (checkpoint / name).write_text(f"{name} of {step}")
    second.stored.fetch_whole()
    assert second.files() == first.files()
    kept = ["step-00000002.ckpt", "step-00000004.ckpt"]
    assert sorted(path.name for path in (second.folder.path / "checkpoints").iterdir()) == kept
