"""A lock has one holder, with and without flock, and a rejected write is a one-sentence error."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import filelock._unix
import pytest

from simbal.errors import BusyError, UserError
from simbal.runs.atomic import (
    atomic_write,
    explain_write_errors,
    is_locked,
    lock,
    remove_partial_files,
    write_json,
)
from simbal.training.run import train
from tests.child_processes import DEADLINE_SECONDS, wait_until

NO_FLOCK = str(Path(__file__).parents[1] / "no_flock")  # for PYTHONPATH
HOLDER = """
import sys, time
from pathlib import Path
from simbal.runs.atomic import lock
with lock(Path(sys.argv[1])):
    Path(sys.argv[2]).touch()
    time.sleep(1000)
"""


@pytest.fixture(params=["flock", "ENOLCK", "ENOSYS"])
def kind(request, monkeypatch):
    """How the file system answers flock."""
    if request.param != "flock":
        number = getattr(errno, request.param)

        def refuse(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(filelock._unix.fcntl, "flock", refuse)
    return request.param


@pytest.fixture
def place(tmp_path):
    return tmp_path / "a.lock"


def test_a_lock_has_one_holder_and_is_released_after_an_error(place, kind):
    assert not is_locked(place)
    assert not place.exists()
    for _ in range(2):
        with lock(place), pytest.raises(BusyError, match=str(place)), lock(place, timeout=0):
            pass
        with pytest.raises(KeyError), lock(place):
            raise KeyError
        assert not is_locked(place)


@pytest.mark.parametrize("path", ["", NO_FLOCK], ids=["flock", "without flock"])
def test_a_waiting_process_gets_the_lock_once_its_holder_is_killed(place, path, tmp_path, monkeypatch):
    if path:
        monkeypatch.setattr(filelock._unix.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [path, *sys.path]))}
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(place), str(tmp_path / "ready")], env=environment)
    wait_until((tmp_path / "ready").exists)
    assert is_locked(place)
    acquired = threading.Event()

    def wait():
        with lock(place, timeout=-1):
            acquired.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    holder.kill()
    holder.wait()
    waiting.join(DEADLINE_SECONDS)
    assert acquired.is_set()


def test_other_errors_of_flock_are_raised(place, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(filelock._unix.fcntl, "flock", fail)
    with pytest.raises(OSError, match="Input/output"), lock(place):
        pass


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space, or choose another output_dir="),
        (errno.EDQUOT, "free some space, or choose another output_dir="),
        (errno.EFBIG, "raise the limit of `ulimit -f`"),
        (errno.EROFS, "choose another output_dir="),
    ],
)
def test_a_write_error_names_the_folder_and_the_remedy(number, remedy):
    error_in_torch = RuntimeError("of torch.save")
    error_in_torch.__context__ = OSError(number, os.strerror(number))
    with pytest.raises(UserError) as error, explain_write_errors(Path("outputs/x")):
        raise error_in_torch
    assert str(error.value) == f"cannot write outputs/x: {os.strerror(number)}; {remedy}"


@pytest.mark.parametrize("place", ["/proc/nope", "/dev/null/x"])
def test_a_folder_that_cannot_be_created_is_not_called_full(small_spec, place):
    with pytest.raises(UserError, match=f"cannot write {place}/.*; choose another output_dir=") as error:
        train(small_spec(output_dir=Path(place)))
    assert "space" not in str(error.value)


def test_an_interrupted_write_changes_nothing(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError), atomic_write(file) as opened:
        opened.writelines([b"half", None])
    assert file.read_text() == '{\n "a": 1\n}\n'
    (tmp_path / ".b.1.part").mkdir()
    (tmp_path / ".c.1.part").touch()
    remove_partial_files(tmp_path)
    assert [*tmp_path.iterdir()] == [file]
    with pytest.raises(UserError, match="Is a directory"):
        write_json(tmp_path, {})
