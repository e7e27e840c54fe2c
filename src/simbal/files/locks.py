"""Locks that one process at a time holds: flock, or a lease where a file system has none, as some network ones."""

import errno
import fcntl
import math
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import LeaseCompromise, SoftFileLease, Timeout

NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
LEASE_SECONDS = 30.0  # without a sign of life, after which a lease of another machine has run out
POLL_SECONDS = 0.25


class TakenError(Exception):
    """Another process has the lock; the message says which, as far as it is known."""


class Lock:
    """The file `path`, which one process at a time holds; the holder's process id and host stand in it.

    flock ends with the process that holds it. A lease is a file beside it, `<path>.lease`, whose time of change its
    holder moves on every ten seconds: it has run out when its process is gone from this machine, or when nothing has
    moved for `LEASE_SECONDS` by the clock of the process that watches it. A process that loses its lease all the same,
    as on a machine that was suspended for longer, is sent SIGTERM.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lease: SoftFileLease | None = None  # kept, as it remembers since when nothing has moved

    @contextmanager
    def held(self, timeout: float = 0.0) -> Iterator[None]:
        """Hold the lock within the `with` block.

        Args:
            timeout: seconds to wait for a lease of another machine to run out; infinite: wait for whoever has the lock.

        Raises:
            TakenError: another process has it.
            OSError: the file cannot be written.
        """
        with open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:  # noqa: PTH123
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if math.isinf(timeout) else fcntl.LOCK_NB))
            except BlockingIOError:
                raise TakenError(_holder(file.read())) from None
            except OSError as error:
                if error.errno not in NO_FLOCK:
                    raise
                self._take_lease(file.read(), timeout)
            try:
                with suppress(OSError):  # a full disk: the lock holds without the name of its holder
                    file.truncate(0)
                    file.seek(0)
                    file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                yield
            finally:
                if self._lease is not None:
                    self._lease.release()

    def looks_held(self) -> bool:
        """Whether a process seems to have the lock.

        Nothing is written, and the lock is tried, for a moment, only if the process that it names may still be there:
        who merely looks keeps nobody from taking it.
        """
        try:
            opened = self.path.open("rb", buffering=0)
        except OSError:
            return False
        with opened as file:
            if _is_gone(file.read()):
                return False
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:
                seen = _signs_of_life(_lease_of(self.path))
                return seen is not None and time.time() - seen[1] / 1e9 < LEASE_SECONDS
        return False

    def _take_lease(self, said: bytes, timeout: float) -> None:
        place = _lease_of(self.path)
        lease = self._lease = self._lease or SoftFileLease(
            place, lease_duration=LEASE_SECONDS, on_compromise=_stop, thread_local=False
        )
        deadline = time.monotonic() + timeout
        seen = _signs_of_life(place)
        while True:
            for _ in range(2):  # the first finds out that the holder is gone
                with suppress(Timeout):
                    lease.acquire(timeout=0)
                    return
            alive = seen not in (None, _signs_of_life(place)) and not math.isinf(timeout)
            if alive or time.monotonic() >= deadline:
                raise TakenError(_holder(said))
            seen = seen or _signs_of_life(place)
            time.sleep(POLL_SECONDS)


def _lease_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lease")


def _is_gone(said: bytes) -> bool:
    """Whether a lock's file names a process of this machine that is no more; one that names none may be held."""
    named = re.match(rb"process (\d+) on (\S+)$", said.strip())
    if named is None or named[2].decode(errors="replace") != socket.gethostname():
        return False
    try:
        os.kill(int(named[1]), 0)
    except ProcessLookupError:
        return True
    except OSError:  # of another user
        return False
    return False


def _signs_of_life(lease: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        about = lease.stat()
        return about.st_ino, about.st_mtime_ns
    return None


def _holder(said: bytes) -> str:
    return said.decode(errors="replace").strip() or "another process"


def _stop(lost: LeaseCompromise) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
