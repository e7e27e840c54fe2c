"""The trials of a search for people: a table on the terminal and trials.csv."""

import csv
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from simbal.files.console import new_grid
from simbal.files.disk import write_text
from simbal.report.arms import short_columns
from simbal.sweep.search.space import SearchSettings, SearchSpace

# user attributes of a trial
RUNS, REPLICATES = "runs", "replicates"  # its run folders, and the objectives of each run
ERROR = "error"  # why it failed or was pruned
STATES = {
    TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.WAITING: "queued",
    TrialState.RUNNING: "running",
}  # fmt: skip


def print_trials(study: optuna.Study, space: SearchSpace, settings: SearchSettings, out: Console) -> None:
    """Print a table of all trials of a study, and the best one."""
    objectives, keys = settings.objectives, [*space.distributions]
    out.print(f"study {study.study_name}", style="bold", soft_wrap=True)
    grid = new_grid("")
    for heading in ("trial", "state", *objectives, *short_columns(keys), "runs", "error"):
        grid.add_column(heading, overflow="fold")
    for trial in study.trials:
        row = _row(study, trial, objectives)
        cells = (row.get(key, "") for key in ("trial", "state", *objectives, *keys, "replicates", "error"))
        grid.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    out.print(grid)
    num_complete = sum(trial.state == TrialState.COMPLETE for trial in study.trials)
    if not num_complete:
        out.print("no trial is complete")
    elif len(objectives) > 1:
        out.print(f"Pareto front of {', '.join(objectives)}:")
        for trial in study.best_trials:
            out.print(f"  {_describe(trial, objectives)}", soft_wrap=True)
    else:
        out.print(f"best: {_describe(study.best_trial, objectives)}", soft_wrap=True)
        if num_complete > 1:
            out.print(
                f"The value of the best of {num_complete} trials is biased, because the same runs selected it. "
                "Compare it on other seeds.",
                soft_wrap=True,
            )


def write_trials(studies: Sequence[tuple[optuna.Study, SearchSpace]], settings: SearchSettings, folder: Path) -> None:
    """Write trials.csv: one line per trial, with numbers in full precision and the folders of its runs."""
    keys = dict.fromkeys(key for _, space in studies for key in space.distributions)
    columns = ["study", "trial", "state", *settings.objectives, *keys, "replicates", "error", "runs"]
    text = StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for study, _ in studies:
        writer.writerows(_row(study, trial, settings.objectives) for trial in study.trials)
    write_text(folder / "trials.csv", text.getvalue())


def format_params(params: dict[str, Any]) -> str:
    """Return parameters as they are given on the command line."""
    return " ".join(f"{key}={value}" for key, value in params.items())


def _row(study: optuna.Study, trial: FrozenTrial, objectives: Sequence[str]) -> dict[str, Any]:
    attrs = trial.user_attrs
    # Optuna sets the value of a pruned trial to its last report
    values = trial.values if trial.state == TrialState.COMPLETE else ()
    return {
        "study": study.study_name, "trial": trial.number,
        "state": STATES.get(trial.state, "failed" if ERROR in attrs else "interrupted"),
        **dict(zip(objectives, values, strict=False)), **trial.params,
        "replicates": len(attrs.get(REPLICATES, ())), "error": attrs.get(ERROR, ""),
        "runs": " ".join(attrs.get(RUNS, ())),
    }  # fmt: skip


def _describe(trial: FrozenTrial, objectives: Sequence[str]) -> str:
    values = " ".join(f"{objective} {value:.4g}" for objective, value in zip(objectives, trial.values, strict=True))
    n = len(trial.user_attrs[REPLICATES])
    source = f"mean of {n} runs" if n > 1 else "one run"
    return f"trial {trial.number}, {values} ({source}): {format_params(trial.params)}"
