"""A sweep that searches: one study for each arm, all of them checked and opened before the first job starts."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import optuna
from rich.console import Console

from simbal.errors import UserError
from simbal.search.search import Launcher, Search
from simbal.search.settings import SearchSettings
from simbal.search.space import SearchSpace
from simbal.search.storage import StudyStorage
from simbal.search.study import Study
from simbal.search.trials import show, write_trials
from simbal.sweep import sweep_file
from simbal.sweep.job import Job
from simbal.table.report import report

UNNAMED = "default"  # the name of a sweep that was given none: its study is not kept


def run_searches(
    spaces: dict[str, SearchSpace],
    settings: SearchSettings,
    compose: Callable[[list[str]], Job],
    launcher: Launcher,
    out: Console,
) -> None:
    """Run what is missing of every study and print its trials; then the table of all runs.

    Args:
        spaces: what to search, by arm; an only one may be called "".
        settings: checked.
        compose: composes and checks a job.
        launcher: runs jobs.
        out: where all of it is shown.

    Raises:
        UserError: before any job starts, for what cannot be searched, opened or run; later as `Search.run`.
    """
    searches = []
    for arm, space in spaces.items():
        job = compose(space.jobs(next(space.probes()))[0])
        folder, config = job.spec.path.parent, job.spec.config
        storage = StudyStorage.read(settings.storage or _default_storage(settings, folder, config["name"]))
        name = "/".join(filter(None, [settings.study_name or config["name"], arm]))
        searches.append(Search(Study(name, space, settings, storage.shared), storage, compose, launcher))
    for search in searches:
        search.check()
    if config["dry_run"]:
        for search in searches:
            out.print(f"dry run: {search.forecast()}", soft_wrap=True)
        return
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with ExitStack() as locks:
        for search in searches:
            locks.enter_context(search.storage.lock(search.study.name))
        _open(searches)
        sweep_file.write(folder, {})
        try:
            _run(searches, settings, folder, out)
        finally:
            _show(searches, folder, out)
    if any(folder.glob("*/config.yaml")):
        report(folder, config["baseline"], config["columns"])
    failed = [trial for search in searches for trial in search.study.failed() if settings.sampler == "grid"]
    if failed:
        raise UserError(f"{len(failed)} points of the grid failed; retry_failed=true tries them again")


def _default_storage(settings: SearchSettings, folder: Path, name: str) -> str:
    if name == UNNAMED and settings.study_name is None:
        return "memory"
    return f"sqlite:///{folder / 'study.db'}"


def _open(searches: Sequence[Search]) -> None:
    with searches[0].storage.errors():
        opened = searches[0].storage.open()
    for search in searches:
        search.open(opened)


def _run(searches: Sequence[Search], settings: SearchSettings, folder: Path, out: Console) -> None:
    for search in searches:
        out.print(search.state(), soft_wrap=True)
    for search in searches:
        if len(searches) > 1 and search.study.missing():
            out.print(f"searching {search.study.name}", soft_wrap=True)
        search.run(lambda: write_trials([s.study for s in searches], folder), out)


def _show(searches: Sequence[Search], folder: Path, out: Console) -> None:
    if not folder.is_dir():
        return
    with searches[0].storage.errors():
        write_trials([search.study for search in searches], folder)
        for search in searches:
            show(search.study, out)
        out.print(f"written: {folder / 'trials.csv'}", soft_wrap=True)
