"""The objectives of a trial: numbers that its runs have left in their records."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from optuna.trial import TrialState

from simbal.errors import UserError
from simbal.metrics.aliases import current
from simbal.runs.folder import DamagedRecordError, RunFolder
from simbal.runs.record import error_of
from simbal.sweep.composer import Job


@dataclass(frozen=True)
class Result:
    """The end of a trial: complete with a row of values for each replicate, failed for a reason, or pruned."""

    state: TrialState
    rows: list[list[float]] = field(default_factory=list)
    error: str = ""


def result(jobs: Sequence[Job], replicates: Sequence[Sequence[str]], objectives: Sequence[str]) -> Result:
    """Return the result of a trial by the records of its jobs, one for each replicate.

    Raises:
        UserError: as `objective_values` does.
    """
    if any(status(job) == "pruned" for job in jobs):
        return Result(TrialState.PRUNED)
    rows = []
    for job, replicate in zip(jobs, replicates, strict=True):
        values, error = objective_values(job.spec.path, job.spec.hash, objectives)
        if error:
            return Result(TrialState.FAIL, error=" ".join([*replicate, error]))
        rows.append(values)
    return Result(TrialState.COMPLETE, rows)


def means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return a trial's values: of each objective the mean over its replicates."""
    return [fmean(column) for column in zip(*rows, strict=True)]


def objective_values(run: Path, config_hash: str, objectives: Sequence[str]) -> tuple[list[float], str]:
    """Return a run's value of each objective by its record, or no values and the reason.

    Raises:
        UserError: if the run is finished but does not measure an objective, or if its record cannot be read.
    """
    try:
        record = RunFolder(run).read_record()
    except DamagedRecordError as error:
        return [], str(error)
    if record is None:
        return [], "left no record; another process may be running it"
    if record["status"] != "finished" or record["config_hash"] != config_hash:
        return [], error_of(record) or record["status"]
    metrics = {**record["metrics"], "tokens_per_second": record["tokens_per_second"]}
    values = []
    for objective in objectives:
        if current(objective) not in metrics:
            raise UserError(f"hydra.sweeper.objectives: {run} has measured no {objective}; it has {', '.join(metrics)}")
        value = metrics[current(objective)]
        if value is None or not math.isfinite(value):
            return [], f"{objective} is {value}"
        values.append(float(value))
    return values, ""


def status(job: Job) -> str | None:
    """Return how the job's run ended; None if it has not."""
    record = RunFolder(job.spec.path).whole_record()
    return record["status"] if record and record["config_hash"] == job.spec.hash else None
