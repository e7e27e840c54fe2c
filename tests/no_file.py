"""What can lie in the place of a file and is none: whoever reads it must neither wait nor read for ever."""

import os
from pathlib import Path

KINDS = ("folder", "pipe", "device", "nothing")


def take_place(file: Path, kind: str) -> None:
    """Put one of `KINDS` where `file` is or is to be; nothing: a link that leads nowhere."""
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to({"device": "/dev/zero", "nothing": "nowhere"}[kind])
