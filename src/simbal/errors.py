"""Errors that a user can put right, and a program's exit codes."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from simbal.commands import as_typed

BUSY = os.EX_TEMPFAIL  # exit code where another process already holds what was asked for
INTERRUPTED, TERMINATED = 130, 143  # 128 + SIGINT, 128 + SIGTERM, as in a shell


class UserError(ValueError):
    """An error that the user can put right: one sentence says what is wrong and what is allowed."""

    def __init__(self, sentence: str) -> None:
        super().__init__(as_typed(sentence))


class BusyError(UserError):
    """Another process already holds what was asked for, so that nothing has failed."""


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turn a `UserError` into `error: <sentence>` on stderr and exit code 1, or `BUSY`; others keep their traceback."""
    try:
        yield
    except BusyError as busy:
        print(f"error: {busy}", file=sys.stderr)
        raise SystemExit(BUSY) from None
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


@contextmanager
def exit_codes() -> Iterator[None]:
    """Make an interrupted program exit with 130 and a terminated one with 143.

    Lightning turns SIGTERM into a `SystemExit` without a code, which would be 0, success; and Ctrl-C into 1.
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
