"""Files that are replaced atomically, and the errors of a disk that refuses to take one."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from simbal.errors import UserError

DISK_REFUSES = (  # EFBIG: a file longer than `ulimit -f` allows
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG,
    errno.ENOENT, errno.EFBIG, errno.EISDIR, errno.ELOOP,
)  # fmt: skip

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
PART = ".part"  # the suffix of files that are being written


def write_json(path: Path, value: Any) -> None:
    """Write `value` so that a reader sees the old file or the new one, never a part; NaN is a `ValueError`."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` atomically; `UserError` if the disk refuses. Lone surrogates become question marks."""
    with refusals_of_disk(path.parent):
        replace_text(path, text.encode("utf-8", "replace").decode())


@contextmanager
def refusals_of_disk(folder: Path) -> Iterator[None]:
    """Raise a `UserError` for a full, read-only or forbidden disk, also where torch.save has wrapped the error."""
    try:
        yield
    except UserError:
        raise  # it says what is wrong, and where
    except Exception as error:
        cause: BaseException | None = error
        while cause and not (isinstance(cause, OSError) and _refuses(cause, folder)):
            cause = cause.__context__
        if not isinstance(cause, OSError):
            raise
        raise UserError(refusal(folder, cause)) from error


def refusal(place: Path, error: OSError, key: str = "output_dir") -> str:
    """Return the sentence that `place` cannot be written, why, and what helps; `key` names its folder in a config."""
    return f"cannot write {place}: {error.strerror or error}; {remedy(error, key)}"


def remedy(error: OSError, key: str) -> str:
    """Return the advice for a disk's error: free space, longer files, or another folder by the config key `key`."""
    if error.errno in NO_SPACE:
        return f"free some space, or choose another {key}="
    if error.errno == errno.EFBIG:
        return "allow longer files with `ulimit -f`"
    return f"choose another {key}="


def replace_text(path: Path, text: str) -> None:
    """Replace the content of `path` by `text` in UTF-8, atomically, as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file in the same folder, which is synced and renamed over `path` at the end.

    Raises:
        OSError: the disk refuses; `path` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)  # the rename too survives a loss of power
    finally:
        temporary.unlink(missing_ok=True)


def remove_parts(folder: Path) -> None:
    """Remove what killed writers have left in `folder`, files and folders; nobody else may be writing there."""
    for temporary in folder.glob(f".*{PART}"):
        if temporary.is_dir() and not temporary.is_symlink():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's list of entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuses(error: OSError, folder: Path) -> bool:
    """Whether the disk refuses a file. ENOENT in a folder that exists does not; below /proc, say, none can be made."""
    return error.errno in DISK_REFUSES and not (error.errno == errno.ENOENT and folder.is_dir())
