"""Finds damage to a study, which is not what a search has written or what its runs' folders say, and rebuilds it.

The folders are the truth. A study's file can be damaged or changed, or come from somebody else.
"""

import math
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

from simbal.config.values import accepts, words
from simbal.errors import BusyError, UserError
from simbal.files.disk import refusals_of_disk
from simbal.files.locks import Lock, TakenError
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec
from simbal.sweep.composer import Job
from simbal.sweep.search.optuna_study import (
    ERROR,
    FIXED,
    HOST,
    LONGEST_TEXT,
    PID,
    REPLICATES,
    RETRY_OF,
    RUNS,
    VALUES,
    OptunaStudy,
    shown,
    this_process,
)
from simbal.sweep.search.results import curve, means, objective_values, result, status
from simbal.sweep.search.search import Search
from simbal.sweep.search.storage import ContentError, StudyStorage

COMPANIONS = ("-journal", "-wal", "-shm")  # suffixes of files beside an SQLite file, with what it still lacks
UNFINISHED = (None, "killed")  # statuses of a run that a search would go on with
ATTRIBUTES = {RUNS: list[str], REPLICATES: list[list[float]], ERROR: str, HOST: str, PID: int, RETRY_OF: int}


def check_content(study: OptunaStudy) -> None:
    """Raise `ContentError` unless every trial has what a search writes: its parameters, values and user attributes."""
    trials = study.trials()
    scratch = optuna.create_study(directions=study.inner.directions)
    for number, trial in enumerate(trials):
        if trial.number != number:
            raise ContentError(f"trial {number} is missing")
        _require_parameters(trial, study)
        for key, value in trial.user_attrs.items():
            kind = ATTRIBUTES.get(key, object)
            if not accepts(value, kind) or (kind is str and len(value) > LONGEST_TEXT):
                raise ContentError(f"{key} of trial {number} is not {words(kind)}")
        try:
            scratch.add_trial(trial)  # which checks state, times, values, and that parameters lie in their intervals
        except ValueError as error:
            raise ContentError(f"trial {number}: {error}") from None
        if trial.state in VALUES and len(trial.user_attrs.get(RUNS, ())) != len(study.space.replicates):
            raise ContentError(f"trial {number} does not name its runs")
        if trial.state == TrialState.COMPLETE:
            _require_values(trial, study)
    for trial in study.failed():
        if ERROR not in trial.user_attrs:
            raise ContentError(f"trial {trial.number} has failed, and does not say why")


def check_results(study: OptunaStudy) -> int:
    """Compare the values of every trial with the records of its runs, and its parameters with their configs.

    Returns:
        The number of runs whose folders are gone, which cannot be compared.

    Raises:
        ContentError: a trial says something else.
    """
    gone = 0
    for trial in study.trials(*VALUES):
        runs = [Path(run) for run in trial.user_attrs[RUNS]]
        specs = [_spec(trial, run) if run.is_dir() else None for run in runs]
        gone += specs.count(None)
        rows = trial.user_attrs[REPLICATES] if trial.state == TrialState.COMPLETE else [None] * len(runs)
        for spec, row in zip(specs, rows, strict=True):
            if spec is not None:
                _require_parameters_of(trial, study, spec)
                if row is not None:
                    _require_row(trial, study, spec, row)
        if trial.state == TrialState.PRUNED and not any(spec is None or status(spec) == "pruned" for spec in specs):
            raise ContentError(f"trial {trial.number} is pruned, {runs[0]} is not")
    return gone


def rebuild(searches: Sequence[Search], folder: Path, out: Console) -> None:
    """Put a damaged file aside, and write in its place the studies as the run folders have them.

    The new file is written beside the old one and then takes its place: a kill loses neither.

    Args:
        searches: those of the command, whose locks it holds.
        folder: that of their runs.
        out: the console, on which a sentence says what was done.

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
            sentences = [_rebuild(search, specs, opened) for search in searches]
            if isinstance(opened, RDBStorage):
                opened.engine.dispose()
        aside = _put_aside(storage.file)
        fresh.file.replace(storage.file)
    for sentence in sentences:
        out.print(sentence, soft_wrap=True)
    out.print(f"the damaged file is kept as {aside}", soft_wrap=True)


def _require_parameters(trial: FrozenTrial, study: OptunaStudy) -> None:
    """Raise `ContentError` unless a trial's parameters are those that are searched.

    A trial that a kill has broken off while it was asked for may lack some of them.
    """
    distributions = study.space.distributions
    for key, distribution in trial.distributions.items():
        if distributions.get(key) != distribution:
            raise ContentError(f"trial {trial.number} has {key} of {distribution}, which is not what is searched")
    if (trial.state in VALUES or ERROR in trial.user_attrs) and trial.params.keys() != distributions.keys():
        raise ContentError(f"trial {trial.number} has no {min(distributions.keys() - trial.params.keys())}")
    queued = trial.system_attrs.get(FIXED, {})
    for key, value in queued.items() if isinstance(queued, dict) else [("parameters", queued)]:
        if key not in distributions or not study.space.contains(key, value):
            raise ContentError(f"trial {trial.number} is queued with {key}={value}, which is not what is searched")


def _require_values(trial: FrozenTrial, study: OptunaStudy) -> None:
    number, rows, values = trial.number, trial.user_attrs.get(REPLICATES, []), trial.values
    if len(values) != len(study.settings.objectives) or not all(map(math.isfinite, values)):
        raise ContentError(f"trial {number} does not have a value of each objective")
    if len(rows) != len(study.space.replicates) or any(len(row) != len(values) for row in rows):
        raise ContentError(f"trial {number} does not have a value of each replicate")
    if means(rows) != values:
        mean = _said(study, means(rows))
        raise ContentError(f"trial {number} has {_said(study, values)}, the mean of its replicates is {mean}")


def _require_parameters_of(trial: FrozenTrial, study: OptunaStudy, spec: RunSpec) -> None:
    for key, value in trial.params.items():
        candidates = study.space.candidates(key, spec)
        if candidates and value not in candidates:
            raise ContentError(f"trial {trial.number} has {key}={value}, {spec.path} has {shown({key: candidates[0]})}")


def _require_row(trial: FrozenTrial, study: OptunaStudy, spec: RunSpec, row: list[float]) -> None:
    try:
        values, error = objective_values(spec, study.settings.objectives)
    except UserError as missing:
        values, error = [], str(missing)
    if values != row:
        said = _said(study, values) if values else error
        raise ContentError(f"trial {trial.number} has {_said(study, row)}; {spec.path} says: {said}")


def _spec(trial: FrozenTrial, run: Path) -> RunSpec:
    try:
        return RunFolder(run).read_spec()
    except UserError as error:
        raise ContentError(f"trial {trial.number}: {error}") from None


def _said(study: OptunaStudy, values: list[float]) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in zip(study.settings.objectives, values, strict=True))


@contextmanager
def _alone(storage: StudyStorage, searches: Iterable[Search]) -> Iterator[None]:
    """Hold the locks of all other studies of the file within the block, as one file holds them all."""
    assert storage.file is not None
    held_already = {storage.lock_file(search.study.name) for search in searches}
    with ExitStack() as held:
        for file in sorted(storage.file.parent.glob(f".{escape(storage.file.name)}-*.lock")):
            try:
                if file not in held_already:
                    held.enter_context(Lock(file).held())
            except TakenError as holder:
                raise BusyError(f"another study in {storage.shown} is being run by {holder}: wait for it") from None
        yield


def _put_aside(file: Path) -> Path:
    free = (f"{file.name}.damaged{number or ''}" for number in count())
    aside = next(path for name in free if not os.path.lexists(path := file.with_name(name)))
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
    search.study.open(opened)
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
    statuses = [status(job.spec) for job in jobs]
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
