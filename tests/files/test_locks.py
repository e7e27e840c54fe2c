"""One holder at a time, with flock and without, and after any end of the holder."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import filelock._unix
import pytest

from simbal.errors import BusyError
from simbal.files.locks import LockedError, is_locked, lock
from simbal.runs.folder import RunFolder
from tests.child_processes import DEADLINE_SECONDS, wait_until

NO_FLOCK = str(Path(__file__).parents[1] / "no_flock")  # for PYTHONPATH
HOLDER = """
import sys, time
from pathlib import Path
from simbal.files.locks import lock
with lock(Path(sys.argv[1])):
    Path(sys.argv[2]).touch()
    time.sleep(1000)
"""


@pytest.fixture(params=["flock", "ENOLCK", "EOPNOTSUPP", "ENOSYS"])
def kind(request, monkeypatch):
    """How the file system answers."""
    if request.param != "flock":
        number = getattr(errno, request.param)

        def refuse(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(filelock._unix.fcntl, "flock", refuse)
    return request.param


@pytest.fixture
def place(tmp_path):
    return tmp_path / "a.lock"


@pytest.fixture
def holder(place, kind, tmp_path):
    """Another process that holds the lock."""
    path = [*([] if kind == "flock" else [NO_FLOCK]), *sys.path]
    command = [sys.executable, "-c", HOLDER, str(place), str(tmp_path / "ready")]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(path)})
    wait_until((tmp_path / "ready").exists)
    yield process
    process.kill()
    process.wait()


def test_one_holds_it_at_a_time_and_an_error_within_lets_go(place, kind):
    assert not is_locked(place)
    assert not place.exists()
    for _ in range(2):
        with lock(place), pytest.raises(LockedError, match=str(place)), lock(place, timeout=0):
            pass
        with pytest.raises(KeyError), lock(place):
            raise KeyError
        assert not is_locked(place)


def test_what_another_process_holds_is_free_for_who_waits_once_it_is_killed(place, kind, holder):
    assert is_locked(place)
    with pytest.raises(LockedError), lock(place):
        pass
    got = threading.Event()

    def wait():
        with lock(place, timeout=-1):
            got.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    holder.kill()
    holder.wait()
    waiting.join(DEADLINE_SECONDS)
    assert got.is_set()


def test_other_errors_of_flock_are_not_taken_for_its_absence(place, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(filelock._unix.fcntl, "flock", fail)
    with pytest.raises(OSError, match="Input/output"), lock(place):
        pass


def test_the_folder_of_a_run_is_held_by_one(tmp_path, kind):
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    with first.lock(), pytest.raises(BusyError), second.lock():
        pass
    with second.lock():
        assert first.looks_busy()
