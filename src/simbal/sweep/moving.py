"""Gives the folder of a sweep another name, and its studies with it, so that the command with that `name=` goes on.

Nothing goes by what a run's own files say of where they lie. What counts is sweep.json, which has the command, and
study.db: a study has the name of its sweep, and names the folders of its runs.
"""

import errno
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from optuna.storages import RDBStorage
from sqlalchemy import Connection, text

from simbal.config.values import check_name
from simbal.errors import BusyError, UserError
from simbal.files.disk import refusals_of_disk, write_json
from simbal.files.locks import Lock
from simbal.report.table import LastSweep
from simbal.runs.folder import is_run
from simbal.runs.removal import refuse_busy
from simbal.sweep.search.optuna_study import RUNS
from simbal.sweep.search.storage import StudyStorage

STUDY, SWEEP, TRIALS = "study.db", "sweep.json", "trials.csv"


def move_sweep(source: Path, target: Path) -> Iterator[str]:
    """Rename a sweep's folder; yield sentences on what was done, and on how the sweep goes on.

    The folder is renamed at once. A kill before the rest is done leaves a study with its old name: the same command
    given again then does what is missing.

    Raises:
        BusyError: one of its runs is being trained, or a search is at one of its studies.
        UserError: one of the folders cannot be, or the study cannot be changed.
    """
    check_name("the new name", target.name)
    again = not source.exists() and _names_in(target, source.name)
    if not again:
        _require_movable(source, target)
        _rename(source, target)
        yield f"moved: {source} is {target} now"
    with refusals_of_disk(target):
        for before, after in _rename_studies(source, target):
            yield f"its study {before} is {after} now"
        command = _rename_in_command(source, target)
    if command:
        yield f"goes on by: {command}"
    elif (target / TRIALS).exists() and not (target / STUDY).exists():
        yield f"its study is not in the folder: go on with hydra.sweeper.study_name={source.name} and its storage"
    if (target / "table.json").exists():
        yield f"its table names the old folder: python report.py {target} writes it anew"


def _require_movable(source: Path, target: Path) -> None:
    """Raise `UserError` unless there is a sweep at `source` that nobody works on, and nothing at `target`."""
    if source.is_symlink() or not source.is_dir():
        raise UserError(f"{source} is {'a link' if source.is_symlink() else 'no folder'}: give outputs/<name>")
    if is_run(source):
        raise UserError(f"{source} is a run, whose folder has its name: give outputs/<name>")
    runs = [child for child in source.iterdir() if child.is_dir() and is_run(child)]
    if not runs and not any((source / name).exists() for name in (SWEEP, STUDY)):
        raise UserError(f"{source} holds no runs: give outputs/<name>")
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} is there already: give a name that is free")
    refuse_busy(runs)
    for lock in source.glob(f".{STUDY}-*.lock"):
        if Lock(lock).looks_held():
            raise BusyError(f"a search is at the study in {source / STUDY}: wait for it, or stop it first")


def _rename(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
    except OSError as error:
        hint = ": copy it there, and move nothing" if error.errno == errno.EXDEV else ""
        raise UserError(f"{source} cannot become {target}: {error.strerror}{hint}") from None


def _names_in(target: Path, name: str) -> bool:
    """Whether a study in the folder still has the name of the sweep that it was."""
    if not (target / STUDY).is_file():
        return False
    storage = StudyStorage.in_file(target / STUDY)
    with storage.content(name):
        opened = storage.open()
        assert isinstance(opened, RDBStorage)
        with opened.engine.connect() as connection:
            found = _studies(connection, name)
        opened.engine.dispose()
    return bool(found)


def _rename_studies(source: Path, target: Path) -> list[tuple[str, str]]:
    """Give the studies in study.db the new name, all or none; return their names before and after."""
    if not (target / STUDY).is_file():
        return []
    storage = StudyStorage.in_file(target / STUDY)
    with storage.content(source.name):
        opened = storage.open()
        assert isinstance(opened, RDBStorage)
        with opened.engine.begin() as connection:
            names = [(name, f"{target.name}{name[len(source.name) :]}") for name in _studies(connection, source.name)]
            for before, after in names:
                change = text("UPDATE studies SET study_name = :after WHERE study_name = :before")
                connection.execute(change, {"before": before, "after": after})
            _rename_folders(connection, source, target)
        opened.engine.dispose()
    return names


def _studies(connection: Connection, name: str) -> list[str]:
    """Return the names of the sweep's studies: one of its own, or one for each arm, `<name>/<arm>`."""
    every = connection.execute(text("SELECT study_name FROM studies")).scalars()
    return [study for study in every if study == name or study.startswith(f"{name}/")]


def _rename_folders(connection: Connection, source: Path, target: Path) -> None:
    """Change the folder in what trials say of their runs."""
    said = text("SELECT trial_user_attribute_id, value_json FROM trial_user_attributes WHERE key = :key")
    for number, value in connection.execute(said, {"key": RUNS}).all():
        runs = [str(_moved(Path(run), source, target)) for run in json.loads(value)]
        change = text("UPDATE trial_user_attributes SET value_json = :value WHERE trial_user_attribute_id = :number")
        connection.execute(change, {"value": json.dumps(runs), "number": number})


def _moved(run: Path, source: Path, target: Path) -> Path:
    """Return where a run is now; one of another folder stays."""
    if run.parent.name != source.name:
        return run
    beside = source.absolute().parent == target.absolute().parent
    return (run.parent.with_name(target.name) if beside else target.absolute()) / run.name


def _rename_in_command(source: Path, target: Path) -> str:
    """Change name= and output_dir= in the command of sweep.json, and return it; empty if there is none."""
    last = LastSweep.of(target)
    if not last.command:
        return ""
    try:
        words = shlex.split(last.command)
    except ValueError:  # nothing that a shell would take
        return ""
    given = {"name": target.name}
    if source.absolute().parent != target.absolute().parent:
        given["output_dir"] = str(target.parent)
    for key, value in given.items():
        words = [word for word in words if not word.startswith(f"{key}=")] + [f"{key}={value}"]
    command = shlex.join(words)
    write_json(target / SWEEP, {"command": command, "runs": last.runs})
    return command
