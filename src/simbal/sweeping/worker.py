"""The process of one job: read the config from the run folder, train, and write all output to console.log."""

import os
import sys
import traceback
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from simbal.errors import UserError, exit_codes, exit_on_user_error
from simbal.processes import ends_with, read_task
from simbal.runs.folder import CONSOLE_FILE, RunFolder
from simbal.runs.spec import RunSpec


def make_task(spec: RunSpec, sweep: int | None) -> dict[str, Any]:
    """Return the task of training `spec` as JSON values; the run folder must already contain the config.

    The job ends when the process with the id `sweep` ends; with None it may outlive the sweep.
    """
    return {"directory": str(Path.cwd()), "folder": str(spec.path), "hash": spec.hash, "sweep": sweep}


def work(task: dict[str, Any]) -> int:
    """Train the run of a task, and append all output to its console.log. No exception leaves this function.

    Returns:
        The exit code: 0; `BUSY` if another process has locked the run; 128 + the number of the signal that stopped it;
        or 1 if it failed, with the reason in console.log.
    """
    os.chdir(task["directory"])
    redirect_output(Path(task["folder"], CONSOLE_FILE))
    with ends_with(task["sweep"]) if task["sweep"] else nullcontext():
        try:
            with exit_codes(), exit_on_user_error():
                from simbal.training.run import train  # imports torch, which the sweep itself does not need

                spec = RunFolder(Path(task["folder"])).read_spec()
                if spec.hash != task["hash"]:
                    raise UserError(f"{spec.path} belongs to another config: move it away, or choose another name=")
                train(replace(spec, trusted=True))
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            return end.code if isinstance(end.code, int) else 1
        except Exception:
            traceback.print_exc()
            return 1
        return 0


def redirect_output(file: Path) -> None:
    """Append all further output of this process and its children to `file`."""
    sys.stdout.flush()
    sys.stderr.flush()
    output = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)


if __name__ == "__main__":
    raise SystemExit(work(read_task()))
