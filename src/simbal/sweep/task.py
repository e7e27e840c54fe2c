"""What a job of a launcher that is not ours does, in whatever process that launcher has made for it."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from simbal.run_folder import BusyError, RunFolder
from simbal.run_spec import RunSpec
from simbal.sweep.outcome import write_failure
from simbal.sweep.tether import tethered


class Task:
    """A task function of Hydra's that never raises: what goes wrong in it ends in the run's record.

    An error would take the other jobs along under joblib (a `SystemExit`) or lose what the launcher would return.
    """

    def __init__(self, function: Callable[[DictConfig], Any]) -> None:
        self.function, self.folder, self.sweep = function, Path.cwd(), os.getpid()

    def __call__(self, cfg: DictConfig) -> None:
        """Do the run; what it prints goes to the end of its console.log."""
        os.chdir(self.folder)  # the workers of a Ray cluster start elsewhere, and the paths of a config are relative
        spec = RunSpec.from_hydra(cfg)
        folder = RunFolder(spec.path)
        with tethered(self.sweep), _output_to(folder.path / "console.log"):
            try:
                self.function(cfg)
            except (Exception, SystemExit) as error:
                if _queued_again(error):
                    raise
                traceback.print_exc()
                if folder.whole_record() is None:
                    with suppress(BusyError):  # another process is at it, which is no failure of the run
                        write_failure(folder, spec, *_end(error))


def _queued_again(error: BaseException) -> bool:
    """Whether submitit leaves to start the job once more, as it has a process for each."""
    return isinstance(error, SystemExit) and isinstance(error.code, int) and "SUBMITIT_EXECUTOR" in os.environ


def _end(error: BaseException) -> tuple[str, str]:
    """Its record's status and error; an exit without a sentence is that of a job that was told to stop."""
    if not isinstance(error, SystemExit):
        return "failed", f"{type(error).__name__}: {error}"
    if isinstance(error.code, str):
        return "failed", error.code.removeprefix("error: ")
    return "killed", f"ended with exit code {error.code or 0} and no result"


@contextmanager
def _output_to(file: Path) -> Iterator[None]:
    """Append what this process and its children print to `file`; the launcher may use the process again."""
    file.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    kept = {stream: os.dup(stream) for stream in (1, 2)}
    try:
        for stream in kept:
            _flush()
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
