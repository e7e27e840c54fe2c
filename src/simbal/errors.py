"""Errors that the user can fix, and the exit codes of the programs."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from simbal.commands import format_command

FAILED, BAD_USAGE = 1, 2  # exit codes: the run failed or cannot start; the command line or a config is wrong
BUSY = os.EX_TEMPFAIL  # exit code: another process is using the run or the sweep
INTERRUPTED, TERMINATED = 130, 143  # exit codes for SIGINT and SIGTERM, as in a shell


class UserError(ValueError):
    """An error that the user can fix; its message is one sentence."""

    exit_code: ClassVar[int] = FAILED

    def __init__(self, message: str) -> None:
        super().__init__(format_command(message))


class ConfigError(UserError):
    """A wrong key, option or value on the command line or in a config file."""

    exit_code = BAD_USAGE


class BusyError(UserError):
    """Another process is using the run or the sweep; nothing has failed."""

    exit_code = BUSY


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turn a `UserError` into `error: <message>` on stderr and its exit code; other errors keep their traceback."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


@contextmanager
def exit_codes() -> Iterator[None]:
    """Make an interrupted program exit with 130 and a terminated one with 143.

    Lightning turns SIGTERM into a `SystemExit` without a code, which would mean success, and SIGINT into exit code 1.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):
            raise SystemExit(INTERRUPTED) from None
        if end.code is None:
            raise SystemExit(TERMINATED) from None
        raise
