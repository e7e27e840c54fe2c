"""Atomic file writes, exclusive locks, and one-sentence errors when the disk rejects a write."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from simbal.errors import BusyError, UserError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
WRITE_ERRORS = (  # EFBIG: the file exceeds `ulimit -f`
    *NO_SPACE, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOENT,
    errno.EFBIG, errno.EISDIR, errno.ELOOP,
)  # fmt: skip
NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
PARTIAL_SUFFIX = ".part"  # of files that are being written


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file in the same folder, then sync it and rename it to `path`.

    Raises:
        OSError: the disk rejects the write; `path` is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_to_disk(path.parent)  # so that the rename survives a power failure
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace the content of `path` atomically; `UserError` if the disk rejects it. Lone surrogates become `?`."""
    with explain_write_errors(path.parent), atomic_write(path) as file:
        file.write(text.encode("utf-8", "replace"))


def write_json(path: Path, value: Any) -> None:
    """Replace the content of `path` with JSON atomically, as `write_text` does; `ValueError` for NaN."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Raise a `UserError` if the disk is full, read-only or forbidden, even if torch.save wraps the error."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause and not _is_write_error(cause, folder):
            cause = cause.__context__
        if not isinstance(cause, OSError):
            raise
        raise UserError(describe_write_error(folder, cause)) from error


def describe_write_error(path: Path, error: OSError, key: str = "output_dir") -> str:
    """Return a sentence on why `path` cannot be written and how to fix it; the config key `key` sets its folder."""
    if error.errno in NO_SPACE:
        remedy = f"free some space, or choose another {key}="
    elif error.errno == errno.EFBIG:
        remedy = "raise the limit of `ulimit -f`"
    else:
        remedy = f"choose another {key}="
    return f"cannot write {path}: {error.strerror or error}; {remedy}"


def _is_write_error(error: BaseException, folder: Path) -> bool:
    """Return whether the disk rejects writes in `folder`; ENOENT in an existing folder has another cause."""
    if not isinstance(error, OSError) or error.errno not in WRITE_ERRORS:
        return False
    return error.errno != errno.ENOENT or not folder.is_dir()


def remove_partial_files(folder: Path) -> None:
    """Remove the files and folders that killed writers left in `folder`; no other process may be writing there."""
    for path in folder.glob(f".*{PARTIAL_SUFFIX}"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def sync_to_disk(path: Path) -> None:
    """Flush a file's content or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def lock(path: Path, timeout: float = 0.2) -> Iterator[None]:
    """Hold the lock file `path` within the block; the file remains, because removing it would be a race.

    Args:
        path: the lock file. File systems without flock get a marker file next to it.
        timeout: seconds to wait for another holder; the default outlasts a process that only calls `is_locked`.
            Negative: wait forever.

    Raises:
        BusyError: another process holds the lock.
        OSError: the file cannot be written.
    """
    file_lock: BaseFileLock = FileLock(path, timeout, fallback_to_soft=False)  # filelock falls back for ENOSYS only
    hint = ""
    try:
        try:
            file_lock.acquire()
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            marker = path.with_name(f"{path.name}.held")
            file_lock = SoftFileLock(marker, timeout)
            hint = "; delete that file if the machine that created it is gone"
            file_lock.acquire()
    except Timeout:
        holder = f"another process, which holds {file_lock.lock_file}{hint}"
        raise BusyError(f"{path.parent} is being written by {holder}") from None
    try:
        yield
    finally:
        file_lock.release()


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock file `path`, without creating it."""
    if not path.exists():
        return False
    try:
        with lock(path, timeout=0):
            return False
    except BusyError:
        return True
    except OSError:  # the folder is read-only
        return False
