"""Runs a sweep that searches: one study for each arm, all checked and opened before the first job starts."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from hydra.plugins.launcher import Launcher
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from simbal.config.schema import can_change_result
from simbal.errors import BusyError, UserError
from simbal.files.console import new_grid
from simbal.files.disk import refusals_of_disk, write_text
from simbal.files.locks import LEASE_SECONDS, Lock, TakenError
from simbal.report.arms import short_columns
from simbal.report.report import report
from simbal.runs.spec import RunSpec, result_keys
from simbal.sweep.composer import Job
from simbal.sweep.one_table import check_columns, require_one_table
from simbal.sweep.resume import require_launch, write_sweep_json
from simbal.sweep.search.optuna_study import ERROR, REPLICATES, RUNS, OptunaStudy, shown
from simbal.sweep.search.search import Search, make_pruner
from simbal.sweep.search.settings import SearchSettings
from simbal.sweep.search.space import SearchSpace
from simbal.sweep.search.storage import format_storage, open_storage, storage_errors, storage_exists

UNNAMED = "default"  # the name of a sweep that was given none: its study is not kept
MOST_ROWS = 50  # on the screen; the file has all


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
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    first = next(iter(spaces.values()))
    sweep = compose(first.jobs(next(first.probes()))[0]).spec
    storage = settings.storage or _default_storage(settings, sweep)
    shown = format_storage(storage)
    searches = [_make_search(arm, space, settings, shown, compose, launcher) for arm, space in spaces.items()]
    jobs = [job for search in searches for job in search.check()]
    require_one_table(jobs)
    check_columns(jobs)
    spec = searches[-1].first_jobs[0].spec
    folder, config = spec.path.parent, spec.config
    if config.dry_run:
        with storage_errors(shown):
            for search in searches:
                out.print(f"dry run: {_forecast(search, storage)}", soft_wrap=True)
        return
    with _lock(folder), storage_errors(shown):
        _open(searches, storage)
        if any(search.study.missing() for search in searches):
            require_launch(jobs, launcher)
        write_sweep_json(folder, {})
        try:
            _run(searches, settings, folder, out)
        finally:
            _show(searches, folder, out)
    if any(folder.glob("*/config.yaml")):
        report(folder, config.baseline, config.columns)
    failed = [trial for search in searches for trial in search.study.failed() if settings.sampler == "grid"]
    if failed:
        raise UserError(f"{len(failed)} points of the grid failed; retry_failed=true tries them again")


def show(study: OptunaStudy, out: Console) -> None:
    """Print every trial, and which is best; of more than `MOST_ROWS` trials, the best of them."""
    objectives, trials = study.settings.objectives, study.trials()
    ranked = sorted(trials, key=lambda trial: _rank(study, trial))
    rows = sorted(ranked[:MOST_ROWS], key=lambda trial: trial.number) if len(objectives) == 1 else trials[:MOST_ROWS]
    out.print(f"study {study.name}", style="bold", soft_wrap=True)
    out.print(_table(study, rows))
    if len(trials) > len(rows):
        out.print(f"and {len(trials) - len(rows)} more in trials.csv")
    for line in _best(study):
        out.print(line, soft_wrap=True)


def write_trials(studies: Sequence[OptunaStudy], folder: Path) -> None:
    """Write trials.csv: one line per trial, numbers in full precision, with the folders of its runs."""
    keys = list(dict.fromkeys(key for study in studies for key in study.space.distributions))
    objectives = studies[0].settings.objectives
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["study", "trial", "state", *objectives, *keys, "replicates", "error", "runs"])
    for study in studies:
        for trial in study.trials():
            values: Sequence[float | str] = _values(trial) or [""] * len(objectives)
            params = [trial.params.get(key, "") for key in keys]
            replicates = len(trial.user_attrs.get(REPLICATES, ()))
            error, runs = trial.user_attrs.get(ERROR, ""), " ".join(trial.user_attrs.get(RUNS, ()))
            writer.writerow([study.name, trial.number, _state(trial), *values, *params, replicates, error, runs])
    write_text(folder / "trials.csv", text.getvalue())


def _make_search(
    arm: str,
    space: SearchSpace,
    settings: SearchSettings,
    storage: str,
    compose: Callable[[list[str]], Job],
    launcher: Launcher,
) -> Search:
    spec = compose(space.jobs(next(space.probes()))[0]).spec
    name = "/".join(filter(None, [settings.study_name or spec.config.name, arm]))
    study = OptunaStudy(name, space, settings, _shared_config(spec, space, settings.replicates))
    return Search(study, storage, compose, launcher)


def _shared_config(spec: RunSpec, space: SearchSpace, replicates: str | None) -> dict[str, str]:
    """Return the options and keys of a study's first run that are neither searched nor replicated, as texts."""
    own = {key.lstrip("+") for key in space.distributions} | ({replicates} if any(space.replicates) else set())
    values = {group: option for group, option in spec.choices.items() if can_change_result(group)}
    values |= result_keys(spec.written)
    return {key: json.dumps(value) for key, value in values.items() if key not in own}


def _default_storage(settings: SearchSettings, spec: RunSpec) -> str:
    if spec.config.name == UNNAMED and settings.study_name is None:
        return "memory"
    return f"sqlite:///{spec.path.parent / 'study.db'}"


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep other searches out of the sweep's folder within the block; `BusyError` if one is running."""
    with refusals_of_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with Lock(folder / ".search.lock").held(2 * LEASE_SECONDS):
            yield
    except TakenError as holder:
        raise BusyError(f"{folder} is being searched by {holder}: wait for it, or choose another name=") from None


def _open(searches: Sequence[Search], storage: str) -> None:
    """Load or create every study, and queue again the trials that a killed search left running."""
    opened = open_storage(storage)
    for search in searches:
        config, study = search.first_jobs[0].spec.config, search.study
        study.open(opened)
        study.inner.pruner = make_pruner(search.settings, config)
        study.requeue(config.retry_failed)


def _forecast(search: Search, storage: str) -> str:
    """Return a sentence on how many trials are done; nothing is created."""
    study, done = search.study, 0
    if storage_exists(storage):
        opened = open_storage(storage)
        if study.name in optuna.get_all_study_names(opened):
            study.open(opened)
            done = study.done()
    return search.progress(done)


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
    write_trials([search.study for search in searches], folder)
    for search in searches:
        show(search.study, out)
    out.print(f"written: {folder / 'trials.csv'}", soft_wrap=True)


def _table(study: OptunaStudy, trials: Sequence[FrozenTrial]) -> Table:
    keys = [*study.space.distributions]
    grid = new_grid("")
    grid.add_column("trial", justify="right")
    grid.add_column("state")
    for objective in study.settings.objectives:
        grid.add_column(objective, justify="right")
    for key in short_columns(keys):
        grid.add_column(key, overflow="fold")
    grid.add_column("n", justify="right")
    grid.add_column("error", overflow="fold")
    for trial in trials:
        values = [f"{value:.6g}" for value in _values(trial)] or [""] * len(study.settings.objectives)
        params = [_short(trial.params.get(key, "")) for key in keys]
        replicates = str(len(trial.user_attrs.get(REPLICATES, ())) or "")
        grid.add_row(str(trial.number), _state(trial), *values, *params, replicates, trial.user_attrs.get(ERROR, ""))
    return grid


def _best(study: OptunaStudy) -> list[str]:
    complete = study.trials(TrialState.COMPLETE)
    if not complete:
        return ["no trial has a value yet"]
    objectives = study.settings.objectives
    if len(objectives) > 1:
        front = study.inner.best_trials
        lines = [f"best trials, none of which is worse than another in every one of {', '.join(objectives)}:"]
        return [*lines, *(f"  {_said(study, trial)}" for trial in front)]
    best = min(complete, key=lambda trial: _rank(study, trial))
    lines = [f"best: {_said(study, best)}"]
    if len(complete) > 1:
        lines.append(
            f"The best of {len(complete)} trials looks better than it is, as the runs that judge it also chose it: "
            "compare it on other seeds."
        )
    return lines


def _said(study: OptunaStudy, trial: FrozenTrial) -> str:
    values = " ".join(
        f"{objective} {value:.6g}" for objective, value in zip(study.settings.objectives, trial.values, strict=True)
    )
    n = len(trial.user_attrs.get(REPLICATES, ()))
    source = f"mean of {n} replicates" if n > 1 else "one run"
    return f"trial {trial.number}, {values} ({source}): {shown(trial.params)}"


def _rank(study: OptunaStudy, trial: FrozenTrial) -> tuple[bool, float, int]:
    if trial.state != TrialState.COMPLETE or len(trial.values) > 1:
        return True, 0.0, trial.number
    sign = -1 if study.inner.directions[0] == StudyDirection.MAXIMIZE else 1
    return False, sign * trial.values[0], trial.number


def _values(trial: FrozenTrial) -> Sequence[float]:
    """Return one value for each objective, or none: to Optuna a pruned trial's last report is its value."""
    return trial.values if trial.state == TrialState.COMPLETE else ()


def _state(trial: FrozenTrial) -> str:
    words = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.WAITING: "queued"}
    if trial.state == TrialState.FAIL:
        return "failed" if ERROR in trial.user_attrs else "broken off"
    return words.get(trial.state, "running")


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
