"""Files behind URLs, by fsspec: glob, download, retries."""

import shutil
import time
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

from simbal.errors import UserError

PAUSES = (1.0, 2.0, 4.0)  # seconds before each further attempt
TIMEOUTS = {"sock_connect": 10, "sock_read": 60}  # seconds
CHUNK = 1 << 20  # bytes
EXTRAS = {
    "hf": "'simbal[hub]'", "s3": "'simbal[s3]'", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp",
}  # fmt: skip
FINAL = {401: "access is refused", 403: "access is refused", 404: "no such file", 410: "no such file"}
_Result = TypeVar("_Result")


class UnreachableError(Exception):
    """A URL cannot be read; the message says why."""


def is_url(name: str) -> bool:
    """Return whether `name` is a remote file; `file://` is a local path."""
    return "://" in name and not name.startswith("file://")


def is_glob(url: str) -> bool:
    """Return whether a URL stands for several files; on the web, `?` begins a query."""
    return "*" in path_of(url) if _is_web(url) else any(sign in url for sign in "*?[")


def path_of(url: str) -> str:
    """Return a URL without the query of a web address, so that it ends in the file's extension."""
    return url.partition("?")[0].partition("#")[0] if _is_web(url) else url


def matching_urls(pattern: str) -> list[str]:
    """Return the URLs of the files that match a glob, sorted.

    Raises:
        UnreachableError: after the last attempt.
        UserError: a package is not installed.
    """

    def find(filesystem: Any, path: str) -> list[str]:
        found = filesystem.glob(path, detail=True)
        return sorted(filesystem.unstrip_protocol(name) for name, info in found.items() if info["type"] == "file")

    return _retry(pattern, find)


def download(url: str, file: BinaryIO) -> None:
    """Write the content of `url` to `file`, and go back to its start.

    The copy is whole before anything is read, so that a lost connection can be retried.

    Raises:
        UnreachableError: after the last attempt.
        UserError: a package is not installed.
    """
    # 0: one streaming request, instead of one for each 5 MB
    options = {"block_size": 0} if url.startswith(("http://", "https://", "hf://")) else {}

    def copy(filesystem: Any, path: str) -> None:
        size = filesystem.info(path).get("size")
        file.seek(0)
        file.truncate()
        with filesystem.open(path, "rb", **options) as remote:
            shutil.copyfileobj(remote, file, CHUNK)
        if size is not None and file.tell() != size:
            raise OSError(f"{file.tell()} bytes came instead of {size}")
        file.seek(0)

    _retry(url, copy)


def _retry(url: str, action: Callable[[Any, str], _Result]) -> _Result:
    """Call `action` with fsspec's filesystem and the path of `url`, again where it fails and might succeed."""
    from fsspec.core import url_to_fs

    protocol = url.partition("://")[0]
    for pause in (*PAUSES, None):
        try:
            filesystem, path = url_to_fs(url, **_options(url))
            filesystem.invalidate_cache()
            return action(filesystem, path)
        except ImportError as error:
            package = EXTRAS.get(protocol)
            raise UserError(f"{url}: {f'pip install {package}' if package else error}") from None
        except Exception as error:  # each filesystem has errors of its own
            if reason := _final_reason(error):
                raise UnreachableError(reason) from error
            if pause is None:
                attempts = len(PAUSES) + 1
                raise UnreachableError(f"{type(error).__name__}: {_first_line(error)}; {attempts} attempts") from error
            time.sleep(pause)
    raise AssertionError


def _options(url: str) -> dict[str, Any]:
    """Return the options of fsspec's filesystem: aiohttp's own limit is five minutes for a whole file."""
    if not _is_web(url):
        return {}
    from aiohttp import ClientTimeout

    # identity: a .gz must arrive as it is stored
    return {
        "headers": {"Accept-Encoding": "identity"}, "client_kwargs": {"timeout": ClientTimeout(total=None, **TIMEOUTS)},
    }  # fmt: skip


def _final_reason(error: Exception) -> str | None:
    """Return why another attempt would fail in the same way, or None."""
    if isinstance(error, FileNotFoundError):
        return FINAL[404]
    if isinstance(error, PermissionError):
        return FINAL[403]
    if isinstance(error, ValueError) and "Protocol not known" in str(error):
        return str(error)
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    return FINAL.get(status) if isinstance(status, int) else None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]


def _is_web(url: str) -> bool:
    return url.startswith(("http://", "https://"))
