"""One holder at a time, with flock and without, and after any end of the holder."""

import errno
import fcntl
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from simbal.errors import BusyError
from simbal.files import locks
from simbal.files.locks import Lock, TakenError
from simbal.runs.folder import RunFolder
from tests.child_processes import DEADLINE_SECONDS, wait_until

HOLDER = """
import sys, time
from pathlib import Path
import fcntl, errno
from simbal.files import locks
def refuse(*_):
    raise OSError(errno.ENOLCK, "No locks available")
if sys.argv[2] == "lease":
    fcntl.flock = refuse
with locks.Lock(Path(sys.argv[1])).held(float("inf")):
    Path(sys.argv[3]).touch()
    time.sleep(1000)
"""


@pytest.fixture(params=["flock", "ENOLCK"])
def kind(request, monkeypatch):
    """How the file system answers."""
    if request.param != "flock":
        number = getattr(errno, request.param)

        def refuse(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(locks.fcntl, "flock", refuse)
    return "flock" if request.param == "flock" else "lease"


@pytest.fixture
def place(tmp_path):
    return tmp_path / "a.lock"


@pytest.fixture
def holder(place, kind, tmp_path):
    """Another process that holds the lock."""
    ready = tmp_path / "ready"
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(place), kind, str(ready)])
    wait_until(ready.exists)
    yield process
    process.kill()
    process.wait()


def test_one_at_a_time_and_the_other_is_told_who(place, kind):
    first, second = Lock(place), Lock(place)
    for _ in range(3):
        with first.held(), pytest.raises(TakenError, match=f"^process {os.getpid()} on "), second.held():
            pass
        with second.held():
            pass
    assert [file.name for file in place.parent.iterdir()] == [place.name]


def test_an_error_within_lets_go(place, kind):
    lock = Lock(place)
    for _ in range(2):
        with pytest.raises(KeyError), lock.held():
            raise KeyError


def test_what_another_process_holds_is_taken_and_free_once_it_is_killed(place, kind, holder):
    lock = Lock(place)
    with pytest.raises(TakenError, match=f"process {holder.pid} on "), lock.held():
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with lock.held():
        pass


def test_who_waits_gets_it(place, kind, holder):
    got = threading.Event()

    def wait():
        with Lock(place).held(math.inf):
            got.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    holder.kill()
    holder.wait()
    waiting.join(DEADLINE_SECONDS)
    assert got.is_set()


@pytest.mark.parametrize("kind", ["ENOLCK"], indirect=True)
def test_a_lease_of_another_machine_runs_out_when_nothing_moves(place, kind, holder, monkeypatch):
    lease = place.with_name("a.lock.lease")
    said = lease.read_bytes()
    holder.kill()
    holder.wait()
    host = locks.socket.gethostname().encode()
    assert host in said
    lease.write_bytes(said.replace(host, b"elsewhere"))
    os.utime(lease, (2**33, 2**33))  # a clock that went ahead: only that nothing changes counts
    watching = Lock(place)
    with pytest.raises(TakenError), watching.held():
        pass
    started = time.monotonic()  # from here on each look at the clock takes 20 s: the first look was by the real one
    looks = itertools.count()
    monkeypatch.setattr(locks.time, "monotonic", lambda: started + 20 * next(looks))
    monkeypatch.setattr(locks.time, "sleep", lambda _: None)
    with watching.held(9000):
        pass


def test_other_errors_of_flock_are_not_taken_for_its_absence(place, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(locks.fcntl, "flock", fail)
    with pytest.raises(OSError, match="Input/output"), Lock(place).held():
        pass
    assert not place.with_name("a.lock.lease").exists()


@pytest.mark.parametrize("kind", ["ENOLCK"], indirect=True)
def test_the_folder_of_a_run_is_held_without_flock(tmp_path, kind):
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    with first.lock(), pytest.raises(BusyError, match="is being written by"), second.lock():
        pass
    with second.lock():
        pass
    assert fcntl.flock is locks.fcntl.flock
