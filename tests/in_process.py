"""Run programs in this process from their command line, without starting Python and importing torch."""

import contextlib
import io
import logging
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

REPOSITORY = Path(__file__).parents[1]


def run(
    folder: Path, program: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Run `program`, such as `train.py`, in `folder` and return its result as `subprocess.run` does."""
    out, said, path = io.StringIO(), io.StringIO(), [*sys.path]
    code: int | str | None = None
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, environment or {}),
        mock.patch.object(sys, "argv", [program, *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(said),
    ):
        try:
            runpy.run_path(str(REPOSITORY / program), run_name="__main__")
        except SystemExit as end:
            code = end.code
        finally:
            sys.path[:] = path
            for logger in logging.root.manager.loggerDict.values():  # Hydra disables all loggers
                logger.disabled = False
    if isinstance(code, str):  # Python prints it and exits with 1
        said.write(f"{code}\n")
        code = 1
    return CompletedProcess([program, *arguments], code or 0, out.getvalue(), said.getvalue())
