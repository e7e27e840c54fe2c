"""Runs a sweep that searches: one study for each arm, all checked and opened before the first job starts."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import optuna
from hydra.plugins.launcher import Launcher
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from simbal.config.schema import can_change_result
from simbal.console import new_grid
from simbal.errors import BusyError, UserError
from simbal.report.arms import short_columns
from simbal.report.report import report
from simbal.runs.atomic import LockedError, explain_write_errors, lock, write_text
from simbal.runs.spec import RunSpec, result_keys
from simbal.sweep.composer import Job
from simbal.sweep.one_table import check_columns, require_one_table
from simbal.sweep.resume import require_buildable, require_launch, write_sweep_json
from simbal.sweep.search.optuna_study import (
    ERROR,
    REPLICATES,
    RUNS,
    OptunaStudy,
    format_storage,
    open_storage,
    storage_errors,
)
from simbal.sweep.search.search import Search, format_params, make_pruner
from simbal.sweep.search.settings import SearchSettings
from simbal.sweep.search.space import SearchSpace

UNNAMED = "default"  # the name of a sweep that was given none: its study is not kept
STATES = {
    TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.WAITING: "queued",
    TrialState.RUNNING: "running",
}  # fmt: skip


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
    specs = {arm: compose(space.jobs(next(space.probes()))[0]).spec for arm, space in spaces.items()}
    spec = next(iter(specs.values()))
    folder, config = spec.path.parent, spec.config
    in_memory = config.name == UNNAMED and settings.study_name is None
    storage = settings.storage or ("memory" if in_memory else f"sqlite:///{folder / 'study.db'}")
    shown = format_storage(storage)
    searches = []
    for arm, space in spaces.items():
        name = "/".join(filter(None, [settings.study_name or config.name, arm]))
        study = OptunaStudy(name, space, settings, _shared_config(specs[arm], space, settings.replicates))
        searches.append(Search(study, shown, compose, launcher))
    studies = [search.study for search in searches]
    jobs = [job for search in searches for job in search.check()]
    require_one_table(jobs)
    check_columns(jobs)
    if config.dry_run:
        require_buildable(jobs, launcher)
        for study in studies:
            out.print(f"dry run: study {study.name} in {shown}: {study.n_trials} trials in all", soft_wrap=True)
        return
    with _lock(folder), storage_errors(shown):
        opened = open_storage(storage)
        for study in studies:
            study.open(opened)
            study.inner.pruner = make_pruner(settings, config)
            study.requeue(config.retry_failed)
        if any(study.missing() for study in studies):
            require_launch(jobs, launcher)
        write_sweep_json(folder, {})
        for search in searches:
            out.print(search.state(), soft_wrap=True)
        try:
            for search in searches:
                if len(searches) > 1 and search.study.missing():
                    out.print(f"searching {search.study.name}", soft_wrap=True)
                search.run(lambda: write_trials(studies, folder), out)
        finally:
            write_trials(studies, folder)
            for study in studies:
                show(study, out)
            out.print(f"written: {folder / 'trials.csv'}", soft_wrap=True)
    if any(folder.glob("*/config.yaml")):
        report(folder, config.baseline, config.columns)
    if settings.sampler == "grid" and (failed := sum(len(study.failed()) for study in studies)):
        raise UserError(f"{failed} points of the grid failed; retry_failed=true tries them again")


def show(study: OptunaStudy, out: Console) -> None:
    """Print every trial, and which is best."""
    objectives, keys = study.settings.objectives, [*study.space.distributions]
    out.print(f"study {study.name}", style="bold", soft_wrap=True)
    grid = new_grid("")
    for heading in ("trial", "state", *objectives, *short_columns(keys), "n", "error"):
        grid.add_column(heading, overflow="fold")
    for trial in study.trials():
        row = _row(study, trial)
        shown = (row.get(key, "") for key in ("trial", "state", *objectives, *keys, "replicates", "error"))
        grid.add_row(*(f"{value:.6g}" if isinstance(value, float) else str(value) for value in shown))
    out.print(grid)
    complete = study.trials(TrialState.COMPLETE)
    if len(objectives) > 1:
        out.print(f"best trials, none of which is worse than another in every one of {', '.join(objectives)}:")
        for trial in study.inner.best_trials:
            out.print(f"  {_describe(study, trial)}", soft_wrap=True)
    elif complete:
        out.print(f"best: {_describe(study, study.inner.best_trial)}", soft_wrap=True)
        if len(complete) > 1:
            out.print(
                f"The best of {len(complete)} trials looks better than it is, as the runs that judge it also chose it: "
                "compare it on other seeds.",
                soft_wrap=True,
            )
    else:
        out.print("no trial has a value yet")


def write_trials(studies: Sequence[OptunaStudy], folder: Path) -> None:
    """Write trials.csv: one line per trial, numbers in full precision, with the folders of its runs."""
    keys = dict.fromkeys(key for study in studies for key in study.space.distributions)
    columns = ["study", "trial", "state", *studies[0].settings.objectives, *keys, "replicates", "error", "runs"]
    text = StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_row(study, trial) for study in studies for trial in study.trials())
    write_text(folder / "trials.csv", text.getvalue())


def _shared_config(spec: RunSpec, space: SearchSpace, replicates: str | None) -> dict[str, str]:
    """Return the options and keys of a study's first run that are neither searched nor replicated, as texts."""
    own = {key.lstrip("+") for key in space.distributions} | ({replicates} if any(space.replicates) else set())
    values = {group: option for group, option in spec.choices.items() if can_change_result(group)}
    values |= result_keys(spec.written)
    return {key: json.dumps(value) for key, value in values.items() if key not in own}


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep other searches out of the sweep's folder within the block; `BusyError` if one is running."""
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with lock(folder / ".search.lock"):
            yield
    except LockedError as holder:
        raise BusyError(f"{folder} is being searched by {holder}: wait for it, or choose another name=") from None


def _row(study: OptunaStudy, trial: FrozenTrial) -> dict[str, Any]:
    attrs = trial.user_attrs
    # to Optuna, the last report of a pruned trial is its value
    values = trial.values if trial.state == TrialState.COMPLETE else ()
    return {
        "study": study.name, "trial": trial.number,
        "state": STATES.get(trial.state, "failed" if ERROR in attrs else "broken off"),
        **dict(zip(study.settings.objectives, values, strict=False)), **trial.params,
        "replicates": len(attrs.get(REPLICATES, ())), "error": attrs.get(ERROR, ""),
        "runs": " ".join(attrs.get(RUNS, ())),
    }  # fmt: skip


def _describe(study: OptunaStudy, trial: FrozenTrial) -> str:
    values = zip(study.settings.objectives, trial.values, strict=True)
    shown = " ".join(f"{objective} {value:.6g}" for objective, value in values)
    n = len(trial.user_attrs[REPLICATES])
    source = f"mean of {n} replicates" if n > 1 else "one run"
    return f"trial {trial.number}, {shown} ({source}): {format_params(trial.params)}"
