"""Fetches files behind URLs: from web servers by requests, from everything else (hf, s3, gs, memory ...) by fsspec.

A file is fetched whole before it is read, so that a lost connection can be tried again and a short copy is noticed.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, BinaryIO, TypeVar

from simbal.errors import UserError

CHUNK = 1 << 20  # bytes
TIMEOUT = (10, 60)  # seconds to connect, and between two pieces
BY_HAND = {
    "http": "curl -LO '{url}'",
    "https": "curl -LO '{url}'",
    "s3": "aws s3 cp '{url}' .",
    "gs": "gcloud storage cp '{url}' .",
}
_HUB = re.compile(r"hf://datasets/([^/]+/[^/@]+)(?:@([^/]*))?/(.+)")  # repository, revision and file
PAUSES = (1.0, 2.0, 4.0)  # seconds before each further attempt
EXTRAS = {"hf": "'simbal[hub]'", "s3": "'simbal[s3]'", "s3a": "'simbal[s3]'", "gs": "gcsfs", "gcs": "gcsfs"}
_Result = TypeVar("_Result")


def is_url(name: str) -> bool:
    """Whether `name` is to be fetched; `file://` is not, as it is a path written in another way."""
    return "://" in name and not name.startswith("file://")


def is_pattern(url: str) -> bool:
    """Whether a URL stands for several files; on the web `?` begins a query, and hosts and users have no `*`."""
    if _is_web(url):
        return "*" in path_of(url).split("/", 3)[-1]
    return any(sign in url for sign in "*?[")


def path_of(url: str) -> str:
    """Return a URL without the query of a web address, so that it ends in the file's extension."""
    return url.partition("?")[0].partition("#")[0] if _is_web(url) else url


def fetch(url: str, file: BinaryIO) -> None:
    """Write all that is behind `url` to `file` and go back to its start.

    Raises:
        UnreachableError: after the last attempt.
        UserError: if a package is needed that is not installed.
        OSError: if `file` cannot be written.
    """

    def attempt() -> None:
        file.seek(0)
        file.truncate()
        for chunk in _chunks(url):
            file.write(chunk)
        file.seek(0)

    persist(attempt)


def matches(pattern: str) -> list[str]:
    """Return the URLs of the files that a pattern stands for, by name.

    Raises:
        UnreachableError: after the last attempt.
        UserError: for a filesystem that has no list of its files, or needs a package that is not installed.
    """
    if _is_web(pattern):
        raise UserError(f"{pattern}: a web server has no list of files to match * with: name each file")

    def attempt() -> list[str]:
        filesystem, path = filesystem_of(pattern)
        try:
            found = filesystem.glob(path, detail=True)
        except Exception as error:
            raise LostError.by(error, pattern) from error
        return sorted(filesystem.unstrip_protocol(name) for name, about in found.items() if about["type"] == "file")

    return persist(attempt)


def fetched_by_hand(url: str) -> str:
    """Return a command that fetches `url` on another machine or by another way; "" if none is known."""
    if found := hub_file(url):
        repository, options, file = found
        what = f"--include '{file}'" if is_pattern(url) else file
        return f"hf download {repository} {what} {options} --local-dir ."
    return BY_HAND.get(url.partition("://")[0], "").format(url=url)


def hub_file(url: str) -> tuple[str, str, str] | None:
    """Return what `hf download` needs for a file of a data set: its repository, options and path; None if it is none.

    The options are the kind of the repository, and the revision unless it is main.
    """
    found = _HUB.fullmatch(url)
    if found is None:
        return None
    repository, revision, file = found.groups()
    at = f" --revision {revision}" if revision not in (None, "", "main") else ""
    return repository, f"--repo-type dataset{at}", file


def _chunks(url: str) -> Iterator[bytes]:
    """Yield all bytes in one attempt; an error of whichever package becomes a `LostError`."""
    filesystem, path = (None, url) if _is_web(url) else filesystem_of(url)
    try:
        yield from _from_web(url) if filesystem is None else _from_filesystem(filesystem, path)
    except LostError:
        raise
    except Exception as error:
        raise LostError.by(error, url) from error


def _from_web(url: str) -> Iterator[bytes]:
    import requests

    # identity: a .gz is to come as it lies there; urllib3 raises for fewer bytes than announced
    headers = {"Accept-Encoding": "identity"}
    with requests.get(url, stream=True, timeout=TIMEOUT, headers=headers) as answer:
        answer.raise_for_status()
        while chunk := answer.raw.read(CHUNK):
            yield chunk


def _from_filesystem(filesystem: Any, path: str) -> Iterator[bytes]:
    filesystem.invalidate_cache()  # some remember a failure
    size, received = filesystem.info(path).get("size"), 0
    streamed = {"block_size": 0} if "hf" in filesystem.protocol else {}  # one request instead of one for each 5 MB
    with closing(filesystem.open(path, "rb", **streamed)) as file:
        while chunk := file.read(CHUNK):
            received += len(chunk)
            yield chunk
    if size is not None and received != size:
        raise LostError(f"{received} bytes came instead of {size}", final=False)


def _is_web(url: str) -> bool:
    return url.startswith(("http://", "https://"))


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
