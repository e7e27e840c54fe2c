"""Fetches a run's files from a store to its folder, which stays as it was until all of them are there."""

import shutil
from collections.abc import Collection
from pathlib import Path

from simbal.errors import UserError
from simbal.files.disk import refusals_of_disk, sync
from simbal.runs.folder import CURVES_FILE, DAMAGED_FILE, DOCUMENTS_FILE, RECORD_FILE
from simbal.store.history import CHECKPOINTS, STEP, Entry, History, Stored
from simbal.store.sending import sha256_of

FETCHED = ".fetched"  # a folder in the run's, of files that are not all there yet
ATTEMPTS = 3  # at an object whose content comes in another form
# what a run writes, and what is therefore removed where the run in the store is without it
REPLACED = (
    "checkpoints", "tensorboard", "csv", "wandb", "logger.json", "train.log",
    RECORD_FILE, DAMAGED_FILE, CURVES_FILE, DOCUMENTS_FILE,
)  # fmt: skip


def fetch(history: History, entry: Entry, paths: Collection[str], folder: Path) -> bool:
    """Make `folder` the run of an entry, with those of its files that `paths` names.

    Returns:
        False if an object is gone, as the run has gone on since: then the folder is as it was.

    Raises:
        UserError: an object is not what was stored, or the disk refuses.
        UnreachableError: the store cannot be reached.
    """
    kept = {path for path, stored in entry.files.items() if has(folder / path, stored)}
    lacking = {path: entry.files[path] for path in paths if path not in kept}
    staged = folder / FETCHED
    try:
        with refusals_of_disk(folder):
            shutil.rmtree(staged, ignore_errors=True)
            if not all(_fetched(history, stored, staged / path) for path, stored in lacking.items()):
                return False
            _remove(folder, kept)
            for path in sorted(lacking, key=_place_in_order):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (staged / path).replace(folder / path)
            return True
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def has(file: Path, stored: Stored) -> bool:
    """Whether a file has the content that is stored."""
    return file.is_file() and file.stat().st_size == stored.bytes and sha256_of(file) == stored.sha256


def _fetched(history: History, stored: Stored, file: Path) -> bool:
    """Fetch an object to a file; return False if it is gone."""
    file.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(ATTEMPTS):
        if not history.bucket.fetch(history.place(stored.object), file):
            return False
        if has(file, stored):
            sync(file)
            return True
    raise UserError(f"{history}/{stored.object} is not what was stored: the run cannot be fetched")


def _remove(folder: Path, kept: set[str]) -> None:
    """Remove what a run writes, but for the paths `kept`; what else lies in its folder stays.

    Folders that become empty go too: a checkpoint that is one gives no way to another that is a file.
    """
    for name in REPLACED:
        place = folder / name
        inside = sorted(place.rglob("*"), reverse=True) if place.is_dir() and not place.is_symlink() else []
        for path in [*inside, place]:
            if path.is_symlink() or path.is_file():
                if path.relative_to(folder).as_posix() not in kept:
                    path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def _place_in_order(path: str) -> tuple[bool, bool, bool, str]:
    """Return a key that puts those last by which a folder is further than another: checkpoints, then the record."""
    return path == RECORD_FILE, path.startswith(CHECKPOINTS), STEP.fullmatch(path) is not None, path
