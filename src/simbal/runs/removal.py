"""Deletes folders of runs: each is renamed away before it is removed, so that a kill leaves no half of a run."""

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from simbal.errors import BusyError, UserError
from simbal.files.disk import refusals_of_disk
from simbal.runs.folder import RunFolder, is_run

DELETED = ".deleted"  # a folder beside the runs; what is in it is no run any more


def run_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the runs that paths name: folders of runs, and all runs in outputs/<name>, each once.

    Raises:
        UserError: one is a link, no folder, or neither a run nor a folder of runs that simbal has written.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"there is no folder {path}")
        runs = [path] if is_run(path) else sorted(child for child in path.iterdir() if child.is_dir() and is_run(child))
        if not runs:
            raise UserError(f"{path} is no run, and holds none: give outputs/<name>/<run>, or outputs/<name>")
        for run in runs:
            if run.is_symlink():
                raise UserError(f"{run} is a link: give the folder that it leads to")
            RunFolder(run).read_spec()  # another program's folder can have a config.yaml too
            found.setdefault(run.resolve(), run)
    return [*found.values()]


def refuse_busy(runs: Iterable[Path]) -> None:
    """Raise `BusyError` if another process is at one of the runs."""
    for run in runs:
        if RunFolder(run).looks_busy():
            raise BusyError(f"{run} is being trained: wait for it, or stop it first")


def delete_runs(runs: Sequence[Path]) -> None:
    """Delete folders of runs, and what an earlier deletion beside them has left; links are not followed.

    Raises:
        BusyError: before anything is deleted, if one is being trained; it names the run.
        UserError: the disk refuses.
    """
    refuse_busy(runs)
    aside = {run: run.absolute().parent / DELETED for run in runs}
    for run, folder in aside.items():
        with refusals_of_disk(folder.parent):
            if folder.is_symlink():
                raise UserError(f"{folder} is a link: delete it")
            folder.mkdir(exist_ok=True)
            with RunFolder(run).lock():
                run.absolute().rename(folder / f"{run.absolute().name}-{os.getpid()}")
        _remove(folder)
    for folder in {*aside.values()}:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder, which another process may be removing too."""
    while folder.exists():
        try:
            with suppress(FileNotFoundError):
                shutil.rmtree(folder)
        except OSError as error:
            raise UserError(f"{folder} cannot be removed: {error.strerror}; what is in it is no run any more") from None
