"""What a trial is judged by: numbers that its runs have left in their records."""

import math
from collections.abc import Sequence

from simbal.errors import UserError
from simbal.record_schema import error_of
from simbal.run_folder import DamagedRecordError, RunFolder
from simbal.sweep.job import Job


def objective_values(job: Job, objectives: Sequence[str]) -> tuple[list[float], str]:
    """What the run's record says of each objective, or why it has no values.

    Raises:
        UserError: if the run is finished but does not measure an objective, or if its record cannot be read.
    """
    try:
        record = RunFolder(job.spec.path).read_record()
    except DamagedRecordError as error:
        return [], str(error)
    if record is None:
        return [], "left no record; another process may be running it"
    if record["status"] != "finished" or record["config_hash"] != job.spec.hash:
        return [], error_of(record) or record["status"]
    metrics = {**record["metrics"], "tokens_per_second": record["tokens_per_second"]}
    values = []
    for objective in objectives:
        if objective not in metrics:
            raise UserError(
                f"hydra.sweeper.objectives: {job.spec.path} has measured no {objective}; it has {', '.join(metrics)}"
            )
        value = metrics[objective]
        if value is None or not math.isfinite(value):
            return [], f"{objective} is {value}"
        values.append(float(value))
    return values, ""


def status(job: Job) -> str | None:
    """How the job's run ended; None if it has not."""
    record = RunFolder(job.spec.path).whole_record()
    return record["status"] if record and record["config_hash"] == job.spec.hash else None
