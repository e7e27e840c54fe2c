"""Files written whole, and what a disk says when it does not take them."""

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simbal.atomic_file import replace_text
from simbal.errors import UserError

DISK_REFUSES = (  # EFBIG: a file longer than `ulimit -f` allows
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG,
    errno.ENOENT, errno.EFBIG,
)  # fmt: skip


def write_json(path: Path, value: Any) -> None:
    """Write `value` so that a reader sees the old file or the new one, never a part (NaN is refused)."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` at once; `UserError` if the disk refuses. Halves of a letter become question marks."""
    with refusals_of_disk(path.parent):
        replace_text(path, text.encode("utf-8", "replace").decode())


@contextmanager
def refusals_of_disk(folder: Path) -> Iterator[None]:
    """Turn a full, read-only or forbidden disk into a `UserError`, also where torch.save has hidden it in another."""
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
        raise UserError(f"cannot write {folder}: {cause.strerror}; free some space, or set output_dir") from error


def _refuses(error: OSError, folder: Path) -> bool:
    """Below /proc, say, no folder can be made; but a file that is missing from a folder is another matter."""
    return error.errno in DISK_REFUSES and not (error.errno == errno.ENOENT and folder.is_dir())
