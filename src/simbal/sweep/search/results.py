"""The results of a trial, which its runs have left in their folders: objectives in the records, curves beside them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from optuna.trial import TrialState

from simbal.runs.curves import readable_rows
from simbal.runs.folder import DamagedRecordError, RunFolder
from simbal.runs.record import error_of, is_number
from simbal.runs.spec import RunSpec
from simbal.sweep.composer import Job

LAST_STEP = 2**31 - 1  # the last step that a database can hold


@dataclass(frozen=True)
class Result:
    """The result of a trial: complete with a row of values for each replicate, failed for a reason, or pruned."""

    state: TrialState
    rows: list[list[float]] = field(default_factory=list)
    error: str = ""


def result(jobs: Sequence[Job], replicates: Sequence[Sequence[str]], objectives: Sequence[str]) -> Result:
    """Return the result of a trial by the records of its jobs, one for each replicate.

    Raises:
        UserError: as `objective_values` does.
    """
    if any(status(job.spec) == "pruned" for job in jobs):
        return Result(TrialState.PRUNED)
    rows = []
    for job, replicate in zip(jobs, replicates, strict=True):
        values, error = objective_values(job.spec, objectives)
        if error:
            return Result(TrialState.FAIL, error=" ".join([*replicate, error]))
        rows.append(values)
    return Result(TrialState.COMPLETE, rows)


def means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return a trial's values: of each objective the mean over its replicates."""
    return [fmean(column) for column in zip(*rows, strict=True)]


def objective_values(spec: RunSpec, objectives: Sequence[str]) -> tuple[list[float], str]:
    """Return a run's value of each objective by its record, or no values and the reason.

    Raises:
        UserError: its record cannot be read.
    """
    try:
        record = RunFolder(spec.path).read_record()
    except DamagedRecordError as error:
        return [], str(error)
    if record is None:
        return [], "left no record; another process may be running it"
    if record["status"] != "finished" or record["config_hash"] != spec.hash:
        return [], error_of(record) or record["status"]
    metrics = {**record["metrics"], "tokens_per_second": record["tokens_per_second"]}
    values = []
    for objective in objectives:
        if objective not in metrics:
            return [], f"{spec.path} has measured no {objective}; it has {', '.join(metrics)}"
        value = metrics[objective]
        if value is None or not math.isfinite(value):
            return [], f"{objective} is {value}"
        values.append(float(value))
    return values, ""


def status(spec: RunSpec) -> str | None:
    """Return how a run ended; None if it has not."""
    record = RunFolder(spec.path).whole_record()
    return record["status"] if record and record["config_hash"] == spec.hash else None


def curve(run: Path, metric: str) -> dict[int, float]:
    """Return finite values of a metric by step, from the first step on.

    Lines that say nothing of the metric are left out, and so are those that cannot be read: the last may be half
    written, and whether the others are what the run has written is said by the checksum of its record.

    Raises:
        UserError: the file is none that a run writes: a pipe, a device, or larger than any.
    """
    found = [row for row in readable_rows(run) if is_number(row.get(metric)) and 0 < row["step"] <= LAST_STEP]
    return {row["step"]: float(row[metric]) for row in found}
