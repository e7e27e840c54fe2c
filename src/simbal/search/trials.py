"""The trials of a study as people read them: a table, the best of them, and trials.csv."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from simbal.console import new_grid
from simbal.run_folder import write_text
from simbal.search.study import Study, shown
from simbal.table.arms import short_columns

MOST_ROWS = 50  # on the screen; the file has all


def show(study: Study, out: Console) -> None:
    """Print every trial, and which is best; of more than `MOST_ROWS` the best."""
    objectives, trials = study.settings.objectives, study.trials()
    ranked = sorted(trials, key=lambda trial: _rank(study, trial))
    rows = sorted(ranked[:MOST_ROWS], key=lambda trial: trial.number) if len(objectives) == 1 else trials[:MOST_ROWS]
    out.print(f"study {study.name}", style="bold", soft_wrap=True)
    out.print(_table(study, rows))
    if len(trials) > len(rows):
        out.print(f"and {len(trials) - len(rows)} more in trials.csv")
    for line in _best(study):
        out.print(line, soft_wrap=True)


def write_trials(studies: Sequence[Study], folder: Path) -> None:
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
            replicates = len(trial.user_attrs.get("replicates", ()))
            error, runs = trial.user_attrs.get("error", ""), " ".join(trial.user_attrs.get("runs", ()))
            writer.writerow([study.name, trial.number, _state(trial), *values, *params, replicates, error, runs])
    write_text(folder / "trials.csv", text.getvalue())


def _table(study: Study, trials: Sequence[FrozenTrial]) -> Table:
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
        replicates = str(len(trial.user_attrs.get("replicates", ())) or "")
        grid.add_row(
            str(trial.number), _state(trial), *values, *params, replicates, str(trial.user_attrs.get("error", ""))
        )
    return grid


def _best(study: Study) -> list[str]:
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


def _said(study: Study, trial: FrozenTrial) -> str:
    values = " ".join(
        f"{objective} {value:.6g}" for objective, value in zip(study.settings.objectives, trial.values, strict=True)
    )
    n = len(trial.user_attrs.get("replicates", ()))
    source = f"mean of {n} replicates" if n > 1 else "one run"
    return f"trial {trial.number}, {values} ({source}): {shown(trial.params)}"


def _rank(study: Study, trial: FrozenTrial) -> tuple[bool, float, int]:
    if trial.state != TrialState.COMPLETE or len(trial.values) > 1:
        return True, 0.0, trial.number
    sign = -1 if study.inner.directions[0] == StudyDirection.MAXIMIZE else 1
    return False, sign * trial.values[0], trial.number


def _values(trial: FrozenTrial) -> Sequence[float]:
    """One for each objective, or none: to Optuna a pruned trial's last report is its value."""
    return trial.values if trial.state == TrialState.COMPLETE else ()


def _state(trial: FrozenTrial) -> str:
    words = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.WAITING: "queued"}
    if trial.state == TrialState.FAIL:
        return "failed" if "error" in trial.user_attrs else "broken off"
    return words.get(trial.state, "running")


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
