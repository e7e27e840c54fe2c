"""A disk that can be filled in no time: a tmpfs, where mounting is permitted."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEGABYTES = 32
_CHUNK = bytes(1 << 20)


class SmallDisk:
    """Mounted at `place`; to be entered while it is used."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __enter__(self) -> "SmallDisk":
        self.place.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "chaos", str(self.place)], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", str(self.place)], check=True)  # lazy: a process that hangs may hold it

    @contextmanager
    def filled(self, left: int) -> Iterator[None]:
        """Meanwhile, about `left` bytes can be written."""
        filler = self.place / "filler"
        try:
            with filler.open("wb", buffering=0) as file:
                size = _write_all(file.fileno())
                file.truncate(max(0, size - left))
            yield
        finally:
            filler.unlink(missing_ok=True)


def _write_all(descriptor: int) -> int:
    """Write zeros until the disk has no room for another; how many there are."""
    size = 0
    while True:
        try:
            size += os.write(descriptor, _CHUNK)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return size


def mountable(folder: Path) -> bool:
    """Whether this user may mount one in `folder`."""
    place = folder / "trial"
    place.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "chaos", str(place)]
    try:
        permitted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:  # no such program
        permitted = False
    if permitted:
        subprocess.run(["umount", str(place)], check=True)
    place.rmdir()
    return permitted
