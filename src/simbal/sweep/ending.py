"""The outcome of a job: by its run's record, and without one the exit reason that its output or its signal gives."""

import os
import re
import signal
from pathlib import Path
from typing import Literal

from simbal.errors import BUSY, BusyError, UserError
from simbal.runs.folder import CONSOLE_FILE, RunFolder
from simbal.runs.record import error_of
from simbal.runs.spec import RunSpec

Outcome = tuple[Literal["done", "pruned", "failed", "elsewhere"], str]  # the text: the error, or who has the run
ELSEWHERE: Outcome = ("elsewhere", "another process is at it")
TAIL, LONGEST = 1 << 20, 2000  # bytes of the output that are looked at, and letters of what is taken from them
ERROR = re.compile(r"^error: (.*)", re.MULTILINE)
# the line that ends a traceback: the first after its heading that is neither empty nor indented
RAISED = re.compile(r"^Traceback \(most recent call last\).*\n(?:(?: .*)?\n)*([^ \n].*)", re.MULTILINE)


def recorded_outcome(folder: RunFolder, spec: RunSpec) -> Outcome | None:
    """Return done, pruned or failed, and the error; None without a record.

    A run has also failed if it has diverged, if its record is damaged or if its folder belongs to another config.
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
    """Return the outcome of a job whose process has ended; write a record for a run that could not write its own.

    Args:
        folder: the run's.
        spec: the run.
        exit_code: of the process; negative: the signal that ended it.
        console_start: byte of console.log at which the job's output begins.
    """
    if (recorded := recorded_outcome(folder, spec)) is not None:
        return recorded
    if exit_code == BUSY:  # another process was quicker, and may have ended since
        return ELSEWHERE
    error = exit_reason(folder.path / CONSOLE_FILE, console_start, exit_code)
    status = "killed" if killed(exit_code) else "failed"  # the next sweep resumes a killed one without being asked
    record = {"status": status, "config_hash": spec.hash, "choices": spec.choices, "seed": spec.config.seed}
    try:
        with folder.lock():
            if folder.valid_record() is None:
                folder.write_record(record | {"error": error})
    except BusyError:
        return ELSEWHERE
    except UserError as refused:
        return "failed", str(refused)
    return recorded_outcome(folder, spec) or ("failed", error)


def exit_reason(console: Path, start: int, exit_status: int) -> str:
    """Return the exit reason in one line.

    It is the signal, else the last `error: ...`, else the last traceback's last line, else the exit code.

    Args:
        console: the job's output.
        start: byte at which this attempt's output begins.
        exit_status: as `Popen.returncode`: negative for a signal.
    """
    if killed(exit_status):
        number = -exit_status if exit_status < 0 else exit_status - 128
        return f"killed by signal {number}{', possibly out of memory' if number == signal.SIGKILL else ''}"
    text = _tail(console, start)
    said = ERROR.findall(text) or RAISED.findall(text)
    if said:
        return str(said[-1])[:LONGEST]
    return f"ended with exit code {exit_status} and no result"


def killed(exit_status: int) -> bool:
    """Whether a signal ended the process: at once, or SIGINT or SIGTERM after it had tidied up."""
    return exit_status < 0 or exit_status in (128 + signal.SIGINT, 128 + signal.SIGTERM)


def _tail(console: Path, start: int) -> str:
    """Return the end of the output from `start` on, however much there is; nothing if the file is gone."""
    try:
        with console.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(min(start, size), size - TAIL))
            return file.read(TAIL).decode(errors="replace")
    except FileNotFoundError:
        return ""
