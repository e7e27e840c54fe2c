"""The one kind of error that a user can put right."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Something a user asked for that cannot be done: one sentence saying what is wrong and what is allowed."""


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turn a `UserError` into `error: <sentence>` on stderr and exit code 1; other errors keep their traceback."""
    try:
        yield
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
