"""The process of a job, whichever launcher has started it: it is given a folder, and does the run in it."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simbal.errors import UserError, exit_codes, exit_on_user_error
from simbal.processes import ends_with, read_task
from simbal.runs.folder import CONSOLE_FILE, RunFolder
from simbal.runs.spec import RunSpec


@dataclass(frozen=True)
class Assignment:
    """A run for a job's process to do, in values that JSON can hold.

    Args:
        directory: the folder that relative paths of the config start from.
        folder: the run's; its config.yaml is what is done.
        hash: the hash of that config.
        sweep: the process with which the job ends; None: it may outlive the sweep.
    """

    directory: str
    folder: str
    hash: str
    sweep: int | None

    @classmethod
    def of(cls, spec: RunSpec, sweep: int | None) -> "Assignment":
        """Return the assignment for a run of this process's user, whose folder is written."""
        return cls(str(Path.cwd()), str(spec.path), spec.hash, sweep)

    def read(self) -> RunSpec:
        """Return the run in the folder, as the user's own; `UserError` if that holds another one by now."""
        spec = RunFolder(Path(self.folder)).read_spec()
        if spec.hash != self.hash:
            raise UserError(f"{self.folder} belongs to another config: move it away, or choose another name=")
        return replace(spec, trusted=True)


def work(assignment: Assignment) -> int:
    """Do the run; what it prints goes to the end of its console.log, and no error leaves.

    Returns:
        The exit code of a program: 0; `BUSY` if another process was quicker; 128 + the signal that has stopped it; 1 if
        it failed, when the console says why.
    """
    os.chdir(assignment.directory)
    watched = ends_with(assignment.sweep) if assignment.sweep else nullcontext()
    with watched, output_to(Path(assignment.folder, CONSOLE_FILE)):
        try:
            with exit_codes(), exit_on_user_error():
                from simbal.training.run import train  # torch, which the sweep itself does without

                train(assignment.read())
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            return end.code if isinstance(end.code, int) else 1
        except Exception:
            traceback.print_exc()
            return 1
        return 0


def work_on(task: dict[str, Any]) -> int:
    """Do the run of an assignment that another process has given as a task, and return what `work` does."""
    return work(Assignment(**task))


@contextmanager
def output_to(file: Path) -> Iterator[None]:
    """Append what this process and its children print to `file`; the process may be used again afterwards."""
    output = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    _flush()
    kept = {stream: os.dup(stream) for stream in (1, 2)}
    try:
        for stream in kept:
            os.dup2(output, stream)
        yield
    finally:
        _flush()
        for stream, before in kept.items():
            os.dup2(before, stream)
            os.close(before)
        os.close(output)


def _flush() -> None:
    for text in (sys.stdout, sys.stderr):
        text.flush()


if __name__ == "__main__":
    raise SystemExit(work_on(read_task()))
