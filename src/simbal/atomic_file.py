"""Files that a reader sees as they were or as they are, never in part."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PART = ".part"  # how the names of files end that are being written


def replace_text(path: Path, text: str) -> None:
    """Make `text` the content of `path`, as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file in the same folder, which is synced and renamed over `path` at the end.

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
    """Remove what killed writers have left in `folder`; nobody else may be writing there."""
    for temporary in folder.glob(f".*{PART}"):
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Put a file's content, or which files are in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
