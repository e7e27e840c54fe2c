"""The outcome of a job: from the record of its run or, without a record, from its output and exit code."""

import os
import re
import signal
from pathlib import Path
from typing import Literal

from simbal.errors import BUSY, BusyError, UserError
from simbal.runs.folder import CONSOLE_FILE, RunFolder
from simbal.runs.record import error_of
from simbal.runs.spec import RunSpec

Outcome = tuple[Literal["done", "pruned", "failed", "locked"], str]  # with the error, or the holder of the lock
LOCKED: Outcome = ("locked", "another process is writing the run")
TAIL_BYTES, MAX_ERROR = 1 << 20, 2000  # how much of the output is searched; characters of an error
ERROR = re.compile(r"^error: (.*)", re.MULTILINE)
# the last line of a traceback: the first line after the heading that is neither empty nor indented
RAISED = re.compile(r"^Traceback \(most recent call last\).*\n(?:(?: .*)?\n)*([^ \n].*)", re.MULTILINE)


def recorded_outcome(folder: RunFolder, spec: RunSpec) -> Outcome | None:
    """Return the outcome according to the record of a run, or None without a record.

    A run counts as failed if it diverged, its record is damaged, or its folder belongs to another config.
    """
    try:
        if folder.is_finished(spec):
            return "done", ""
        record = folder.read_record()
    except UserError as error:
        return "failed", str(error)
    if record is None:
        return None
    return "pruned" if record["status"] == "pruned" else "failed", error_of(record)


def record_exit(folder: RunFolder, spec: RunSpec, exit_code: int, console_start: int) -> Outcome:
    """Return the outcome of a job whose process has ended, and write a record for a run that could not write one.

    Args:
        folder: the folder of the run.
        spec: the run.
        exit_code: exit code of the process; a negative one is the signal that killed it.
        console_start: byte of console.log at which the output of this attempt begins.
    """
    if (recorded := recorded_outcome(folder, spec)) is not None:
        return recorded
    if exit_code == BUSY:  # another process held the lock, and may have released it since
        return LOCKED
    error = exit_reason(folder.path / CONSOLE_FILE, console_start, exit_code)
    status = "killed" if was_killed(exit_code) else "failed"  # the next sweep resumes killed runs
    record = {"status": status, "config_hash": spec.hash, "choices": spec.choices, "seed": spec.config.seed}
    try:
        with folder.lock():
            if folder.valid_record() is None:
                folder.write_record(record | {"error": error})
    except BusyError:
        return LOCKED
    except UserError as refused:
        return "failed", str(refused)
    return recorded_outcome(folder, spec) or ("failed", error)


def exit_reason(console: Path, start: int, exit_code: int) -> str:
    """Return why a job ended, in one line: the signal, the last error, the last exception or the exit code.

    Args:
        console: the file with the output of the job.
        start: byte at which the output of this attempt begins.
        exit_code: as `Popen.returncode`, negative for a signal.
    """
    if was_killed(exit_code):
        number = -exit_code if exit_code < 0 else exit_code - 128
        return f"killed by signal {number}{', possibly out of memory' if number == signal.SIGKILL else ''}"
    text = ""
    if console.exists():
        with console.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(min(start, size), size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    errors = ERROR.findall(text) or RAISED.findall(text)
    return str(errors[-1])[:MAX_ERROR] if errors else f"ended with exit code {exit_code} and no result"


def was_killed(exit_code: int) -> bool:
    """Return whether a signal ended the process, even if the process handled SIGINT or SIGTERM and exited."""
    return exit_code < 0 or exit_code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
