"""One file of a checkpoint: written whole or not at all, and verified when it is read."""

import errno
import zipfile
from pathlib import Path
from typing import Any

import torch

from simbal.files.disk import replacing

WHOLE = {"state_dict", "config_hash", "global_step"}  # keys of every checkpoint, also of one with weights alone


class DamagedCheckpointError(Exception):
    """A file is not what was written, or never was a checkpoint; the message says why in a few words."""


def write_file(content: dict[str, Any], file: Path) -> None:
    """Write a file of a checkpoint beside its target, sync and rename it: a kill at any moment leaves the old one."""
    with replacing(file) as opened:
        torch.save(content, opened)


def opened_file(file: Path) -> dict[str, Any]:
    """Return what a file holds, of whose checksums nobody asks; tensors are mapped, and nothing in it is executed."""
    return dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True))


def read_file(file: Path) -> dict[str, Any]:
    """Return what `opened_file` does, once the file's checksums are verified.

    The zip format has a checksum for each tensor, which torch does not look at.

    Raises:
        DamagedCheckpointError: it is not what was written.
        OSError: the disk's fault.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            if (bad := archive.testzip()) is not None:
                raise DamagedCheckpointError(f"its part {bad} is damaged")
        saved = opened_file(file)
        if not saved.keys() >= WHOLE:
            raise DamagedCheckpointError(f"it has no {' and no '.join(sorted(WHOLE - saved.keys()))}")
    except (MemoryError, DamagedCheckpointError):
        raise
    except Exception as error:  # damage shows in as many ways as there are bytes
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise DamagedCheckpointError(type(error).__name__) from None
    return saved
