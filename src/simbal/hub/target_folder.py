"""The folder that an export appears in: whole or not at all, and never in place of anything else."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from simbal.atomic_file import sync
from simbal.errors import UserError
from simbal.hub.weight_files import SINGLE, read_json

FACTS = "simbal.json"  # whose export it is
FILES = {"README.md", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", SINGLE, FACTS}


def require_free(target: Path, config_hash: str, overwrite: bool) -> None:
    """`UserError` unless an export of the run with this hash may take the place.

    It may replace an earlier one of the same run, with `overwrite` that of another; files that no export writes are
    never removed.
    """
    try:
        names = {file.name for file in target.iterdir()} if target.exists() else set()
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}") from None
    if foreign := sorted(names - FILES):
        raise UserError(f"{target} holds {foreign[0]!r}, which is no file of an export: choose another to=")
    if not names or overwrite:
        return
    if FACTS not in names or read_json(target / FACTS).get("config_hash") != config_hash:
        raise UserError(
            f"{target} holds something other than an export of this run: choose another to=, or overwrite=true"
        )


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, which is synced and takes its place at the end.

    What is there already is renamed first: a kill between the two renames leaves it as `.<name>.<pid>.old`.

    Raises:
        UserError: the disk refuses; what was there is there still.
    """
    part, old = (target.with_name(f".{target.name}.{os.getpid()}.{end}") for end in ("part", "old"))
    try:
        part.mkdir(parents=True)
        yield part
        for file in (*part.iterdir(), part):
            sync(file)
        if target.exists():
            target.rename(old)
        try:
            part.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
        sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise UserError(f"cannot write {target}: {reason}; free some space, or choose another to=") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
