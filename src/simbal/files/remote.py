"""What is behind URLs, by fsspec: its filesystem, further attempts where one failed, and the reason in a few words."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from simbal.errors import UserError

PAUSES = (1.0, 2.0, 4.0)  # seconds before each further attempt
EXTRAS = {"hf": "'simbal[hub]'", "s3": "'simbal[s3]'", "s3a": "'simbal[s3]'", "gs": "gcsfs", "gcs": "gcsfs"}
_Result = TypeVar("_Result")


class UnreachableError(Exception):
    """A URL cannot be read; the message says why."""


class LostError(Exception):
    """One attempt failed; `final`: another would fail in the same way."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final

    @classmethod
    def by(cls, error: Exception, url: str) -> "LostError":
        """Return the failure of an attempt at `url` that an error of whichever package has ended."""
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, FileNotFoundError) or status in (404, 410):
            return cls("there is no such file", final=True)
        if isinstance(error, PermissionError) or status in (401, 403):
            return cls("access is refused", final=True)
        return cls(reason(error, url), final=False)


def persist(attempt: Callable[[], _Result]) -> _Result:
    """Return what `attempt` returns, tried again after a pause where it is lost; `UnreachableError` after the last."""
    for pause in (*PAUSES, None):
        try:
            return attempt()
        except LostError as error:
            if error.final:
                raise UnreachableError(str(error)) from error
            if pause is None:
                raise UnreachableError(f"{error}; {len(PAUSES) + 1} attempts") from error
            time.sleep(pause)
    raise AssertionError


def filesystem_of(url: str) -> tuple[Any, str]:
    """Return fsspec's filesystem of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    protocol = url.partition("://")[0]
    try:
        found, path = url_to_fs(url)
    except ImportError as error:
        package = EXTRAS.get(protocol)
        remedy = f"pip install {package}" if package else str(error)
        raise UserError(f"{url} needs a package that is not installed: {remedy}") from None
    except ValueError as error:
        raise UserError(f"{url} is no URL that fsspec knows: {error}") from None
    except Exception as error:
        raise LostError.by(error, url) from error
    return found, path


def reason(error: BaseException, url: str) -> str:
    """Return the reason of an error, in the operating system's words if those are at the bottom of its causes."""
    cause = error.__context__
    while cause:
        error, cause = cause if isinstance(cause, OSError) else error, cause.__context__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {line[:200]}".removesuffix(": ")
