"""Rebuilds damaged studies from the folders of their runs."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from glob import escape
from itertools import count, product
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from simbal.errors import BusyError, UserError
from simbal.files.disk import refusals_of_disk
from simbal.files.locks import Lock, TakenError
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec
from simbal.sweep.composer import Job
from simbal.sweep.search.objective import means, result, status
from simbal.sweep.search.pruning import curve
from simbal.sweep.search.search import Search
from simbal.sweep.search.storage import StudyStorage
from simbal.sweep.search.study import ERROR, LONGEST_TEXT, REPLICATES, RUNS, this_process

COMPANIONS = ("-journal", "-wal", "-shm")  # suffixes of files beside an SQLite file, with what it still lacks
UNFINISHED = (None, "killed")  # statuses of a run that a search would go on with


def rebuild(searches: Sequence[Search], folder: Path, out: Console) -> None:
    """Put a damaged file aside, and write in its place the studies as the run folders have them.

    The new file is written beside the old one and then takes its place: a kill loses neither.

    Args:
        searches: those of the command, whose locks it holds.
        folder: that of their runs.
        out: where it is said what was done.

    Raises:
        BusyError: another process works on a study of the same file.
    """
    storage = searches[0].storage
    assert storage.file is not None
    with _alone(storage, searches), refusals_of_disk(storage.file.parent):
        fresh = storage.beside("rebuilt")
        assert fresh.file is not None
        _remove(fresh.file)
        specs = [*_specs(folder, out)]
        with fresh.translate_errors():
            opened = fresh.open()
            said = [_rebuild(search, specs, opened) for search in searches]
            if isinstance(opened, RDBStorage):
                opened.engine.dispose()
        aside = _put_aside(storage.file)
        fresh.file.replace(storage.file)
    for line in said:
        out.print(line, soft_wrap=True)
    out.print(f"the damaged file is kept as {aside}", soft_wrap=True)


@contextmanager
def _alone(storage: StudyStorage, searches: Iterable[Search]) -> Iterator[None]:
    """Hold the locks of all other studies of the file within the block, as one file holds them all."""
    assert storage.file is not None
    own = {storage.lock_file(search.study.name) for search in searches}
    with ExitStack() as held:
        for file in sorted(storage.file.parent.glob(f".{escape(storage.file.name)}-*.lock")):
            try:
                if file not in own:
                    held.enter_context(Lock(file).held())
            except TakenError as holder:
                raise BusyError(f"another study in {storage.shown} is being run by {holder}: wait for it") from None
        yield


def _put_aside(file: Path) -> Path:
    free = (f"{file.name}.damaged{number or ''}" for number in count())
    aside = next(place for name in free if not os.path.lexists(place := file.with_name(name)))
    for end in ("", *COMPANIONS):
        if Path(f"{file}{end}").exists():
            Path(f"{file}{end}").replace(f"{aside}{end}")
    return aside


def _remove(file: Path) -> None:
    """Remove what a rebuilding that was killed has left."""
    for end in ("", *COMPANIONS):
        Path(f"{file}{end}").unlink(missing_ok=True)


def _specs(folder: Path, out: Console) -> Iterator[RunSpec]:
    for config in sorted(folder.glob("*/config.yaml")):
        try:
            yield RunFolder(config.parent).read_spec()
        except UserError as error:
            out.print(f"left out: {error}", soft_wrap=True)


def _rebuild(search: Search, specs: Iterable[RunSpec], opened: optuna.storages.BaseStorage) -> str:
    """Begin the study again with its trials, in the order in which their runs were started; queue broken-off ones."""
    search.begin(opened)
    points = [*_points(search, specs)]
    trials = [trial for trial in (_trial(search, *point) for point in points) if trial is not None]
    for trial in sorted(trials, key=lambda trial: (trial.datetime_start, trial.user_attrs[RUNS])):
        search.study.inner.add_trial(trial)
    queued = [params for params, jobs in points if _is_unfinished(jobs)]
    for params in queued:
        search.study.inner.enqueue_trial(params, user_attrs=this_process())
    counts = Counter(trial.state.name.lower() for trial in trials) | Counter(queued=len(queued))
    parts = [f"{number} {state}" for state, number in counts.items() if state != "complete"]
    said = f"study {search.study.name}: rebuilt {counts['complete']} complete trials from the folders of their runs"
    return ", ".join([said, *parts])


def _points(search: Search, specs: Iterable[RunSpec]) -> Iterator[tuple[dict[str, Any], list[Job]]]:
    """Yield parameters with their jobs for every run that is one of these jobs exactly; shared jobs once."""
    seen = set()
    for spec in specs:
        if spec.hash in seen:
            continue
        for params in _possible(search, spec):
            try:
                jobs = search.jobs(params)
            except UserError:  # no run of this search has such parameters
                continue
            if spec.hash in (hashes := {job.spec.hash for job in jobs}):
                seen |= hashes
                yield params, jobs
                break


def _possible(search: Search, spec: RunSpec) -> Iterator[dict[str, Any]]:
    keys = [*search.space.distributions]
    for values in product(*(search.space.candidates(key, spec) for key in keys)):
        if all(map(search.space.contains, keys, values)):
            yield dict(zip(keys, values, strict=True))


def _is_unfinished(jobs: Sequence[Job]) -> bool:
    statuses = [status(job) for job in jobs]
    return "pruned" not in statuses and any(status in UNFINISHED for status in statuses)


def _trial(search: Search, params: dict[str, Any], jobs: Sequence[Job]) -> FrozenTrial | None:
    """Return the trial as the search would have written it; None if a run has not ended."""
    if _is_unfinished(jobs):
        return None
    objectives = search.settings.objectives
    ended = result(jobs, search.space.replicates, objectives)
    attributes: dict[str, Any] = {RUNS: [str(job.spec.path) for job in jobs], **this_process()}
    if ended.state == TrialState.COMPLETE:
        attributes[REPLICATES] = ended.rows
    else:
        attributes[ERROR] = (ended.error or "pruned")[:LONGEST_TEXT]
    values = curve(jobs[0].spec.path, objectives[0]) if search.settings.pruner != "none" else {}
    trial = optuna.trial.create_trial(
        state=ended.state, values=means(ended.rows) or None, params=params,
        distributions=dict(search.space.distributions), user_attrs=attributes, intermediate_values=values,
    )  # fmt: skip
    trial.datetime_start = min(_times(jobs, "started"), default=datetime.fromtimestamp(0))
    trial.datetime_complete = max(_times(jobs, "ended"), default=trial.datetime_start)
    return trial


def _times(jobs: Iterable[Job], key: str) -> Iterator[datetime]:
    """Yield times of the runs' records in local time, as Optuna has it; not every version has written them."""
    for job in jobs:
        said = (RunFolder(job.spec.path).whole_record() or {}).get(key, "")
        with suppress(ValueError, OverflowError):
            yield datetime.fromisoformat(said).astimezone().replace(tzinfo=None)
