"""How a run ended, going by its record alone."""

from simbal.record_schema import error_of
from simbal.run_folder import RunFolder
from simbal.run_spec import RunSpec
from simbal.sweep.attempt import State


def outcome(folder: RunFolder, spec: RunSpec) -> tuple[State, str] | None:
    """Done, pruned or failed, and the error; None without a record. A run that has diverged has failed.

    Raises:
        UserError: the record is damaged, or the folder belongs to another config.
    """
    if folder.finished(spec):
        return "done", ""
    record = folder.read_record()
    if record is None:
        return None
    return "pruned" if record["status"] == "pruned" else "failed", error_of(record)


def write_failure(folder: RunFolder, spec: RunSpec, status: str, error: str) -> None:
    """The record of a run that came to an end before it could write one.

    Args:
        folder: the run's.
        spec: what it was to be.
        status: failed, or killed: the next sweep goes on with it unasked.
        error: one line.

    Raises:
        BusyError: another process is writing the run.
    """
    record = {"status": status, "config_hash": spec.hash, "choices": spec.choices, "seed": spec.config["seed"]}
    with folder.lock():
        folder.write_record(record | {"error": error})
