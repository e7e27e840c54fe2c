"""Locks that one process at a time holds, by filelock: flock, or a marker file where a file system has no flock."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


class LockedError(Exception):
    """Another process holds the lock; the message says which file."""


@contextmanager
def lock(path: Path, timeout: float = 0.2) -> Iterator[None]:
    """Hold the lock file `path` within the block.

    Args:
        path: the file, which stays, since removing it would be a race.
        timeout: seconds to wait for its holder, enough for one that only looks; negative: without end.

    Raises:
        LockedError: another process still holds it.
        OSError: the file cannot be written.
    """
    held: BaseFileLock = FileLock(path, timeout, fallback_to_soft=False)  # its own fallback is for ENOSYS alone
    advice = ""
    try:
        try:
            held.acquire()
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            marker = path.with_name(f"{path.name}.held")
            held, advice = SoftFileLock(marker, timeout), "; delete that file if the holder's machine is gone"
            held.acquire()
    except Timeout:
        raise LockedError(f"another process, which holds {held.lock_file}{advice}") from None
    try:
        yield
    finally:
        held.release()


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock file `path`; it is not created."""
    if not path.exists():
        return False
    try:
        with lock(path, timeout=0):
            return False
    except LockedError:
        return True
    except OSError:  # of a folder that cannot be written
        return False
