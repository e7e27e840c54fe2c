"""Files that a reader sees as they were or as they are, never in part."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write to a temporary file in the same folder, sync it and rename it over `path`.

    Raises:
        OSError: the disk refuses; `path` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
