"""Checks that a study is what a search has written, and says what the folders of its runs say.

The folders are the truth. A study's file can be damaged or changed, or come from somebody else.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.runs.record import is_number
from simbal.runs.spec import RunSpec
from simbal.sweep.search.objective import means, objective_values
from simbal.sweep.search.storage import ContentError
from simbal.sweep.search.study import (
    ERROR,
    FIXED,
    HOST,
    LONGEST_TEXT,
    PID,
    REPLICATES,
    RETRY_OF,
    RUNS,
    VALUES,
    Study,
    shown,
)


def check_content(study: Study) -> None:
    """Raise `ContentError` unless every trial has what a search writes: its parameters, values and user attributes."""
    trials = study.trials()
    scratch = optuna.create_study(directions=study.inner.directions)
    for number, trial in enumerate(trials):
        if trial.number != number:
            raise ContentError(f"trial {number} is missing")
        _require_parameters(trial, study)
        for key, (right, kind) in ATTRIBUTES.items():
            if key in trial.user_attrs and not right(trial.user_attrs[key]):
                raise ContentError(f"{key} of trial {number} is not {kind}")
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


def check_results(study: Study) -> int:
    """Compare the values of every trial with the records of its runs, and its parameters with their configs.

    Returns:
        The number of runs whose folders are gone, which cannot be compared.

    Raises:
        ContentError: a trial says something else.
    """
    gone = 0
    for trial in study.trials(*VALUES):
        runs = [Path(run) for run in trial.user_attrs[RUNS]]
        there = [run.is_dir() for run in runs]
        gone += there.count(False)
        specs = {run: _spec(trial, run) for run, is_there in zip(runs, there, strict=True) if is_there}
        for run, spec in specs.items():
            _require_parameters_of(trial, study, run, spec)
        if trial.state == TrialState.COMPLETE:
            for run, row in zip(runs, trial.user_attrs[REPLICATES], strict=True):
                if run in specs:
                    _require_row(trial, study, run, specs[run], row)
        elif all(there) and not any(_pruned(run, spec) for run, spec in specs.items()):
            raise ContentError(f"trial {trial.number} is pruned, {runs[0]} is not")
    return gone


def _require_parameters(trial: FrozenTrial, study: Study) -> None:
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


def _require_values(trial: FrozenTrial, study: Study) -> None:
    number, rows, values = trial.number, trial.user_attrs.get(REPLICATES, []), trial.values
    if len(values) != len(study.settings.objectives) or not all(map(math.isfinite, values)):
        raise ContentError(f"trial {number} does not have a value of each objective")
    if len(rows) != len(study.space.replicates) or any(len(row) != len(values) for row in rows):
        raise ContentError(f"trial {number} does not have a value of each replicate")
    if means(rows) != values:
        mean = _said(study, means(rows))
        raise ContentError(f"trial {number} has {_said(study, values)}, the mean of its replicates is {mean}")


def _require_parameters_of(trial: FrozenTrial, study: Study, run: Path, spec: RunSpec) -> None:
    for key, value in trial.params.items():
        candidates = study.space.candidates(key, spec)
        if candidates and value not in candidates:
            raise ContentError(f"trial {trial.number} has {key}={value}, {run} has {shown({key: candidates[0]})}")


def _require_row(trial: FrozenTrial, study: Study, run: Path, spec: RunSpec, row: list[float]) -> None:
    try:
        values, error = objective_values(run, spec.hash, study.settings.objectives)
    except UserError as missing:
        values, error = [], str(missing)
    if values != row:
        said = _said(study, values) if values else error
        raise ContentError(f"trial {trial.number} has {_said(study, row)}; {run} says: {said}")


def _spec(trial: FrozenTrial, run: Path) -> RunSpec:
    try:
        return RunFolder(run).read_spec()
    except UserError as error:
        raise ContentError(f"trial {trial.number}: {error}") from None


def _pruned(run: Path, spec: RunSpec) -> bool:
    record = RunFolder(run).whole_record()
    return record is not None and record["status"] == "pruned" and record["config_hash"] == spec.hash


def _said(study: Study, values: list[float]) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in zip(study.settings.objectives, values, strict=True))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_TEXT


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, list) and all(map(is_number, row)) for row in value)


ATTRIBUTES: dict[str, tuple[Callable[[Any], bool], str]] = {
    RUNS: (_is_texts, "a list of folders"), REPLICATES: (_is_rows, "a list of numbers"), ERROR: (_is_text, "text"),
    HOST: (_is_text, "text"), PID: (_is_whole, "a whole number"), RETRY_OF: (_is_whole, "a whole number"),
}  # fmt: skip
