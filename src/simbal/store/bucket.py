"""Objects below a URL, by fsspec: read, written, listed, deleted, and created on the condition that there is none yet.

What fails in passing, as by a time-out or 503, is tried again. Access that is refused is tried once more, with
credentials that are read anew: those that were read at the start of a long run expire.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from simbal.errors import UserError
from simbal.files import remote
from simbal.files.disk import NO_SPACE
from simbal.files.remote import LostError

NO_OBJECT = "PreconditionFailed"  # S3's word for a condition that does not hold
ANSWER_SECONDS = 120.0  # until an object is given up that is neither sent nor refused, and
BYTES_PER_SECOND = 100_000  # the slowest line that still gets what is large across
Result = TypeVar("Result")


class UnreachableError(UserError):
    """The store cannot be reached, or refuses; the message says which and why."""


class Bucket:
    """The objects below a URL, by their names."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def names(self, folder: str) -> list[str]:
        """Return the names of all objects below a folder, in order."""

        def find(filesystem: Any, root: str) -> list[str]:
            filesystem.invalidate_cache()
            return [path.removeprefix(f"{root}/") for path in filesystem.find(f"{root}/{folder}".rstrip("/"))]

        try:
            return sorted(self._persist(find))
        except FileNotFoundError:
            return []

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder, in order."""

        def listed(filesystem: Any, root: str) -> list[str]:
            filesystem.invalidate_cache()
            found = filesystem.ls(f"{root}/{folder}".rstrip("/"), detail=True)
            return [about["name"].rstrip("/").rpartition("/")[2] for about in found if about["type"] == "directory"]

        try:
            return sorted(self._persist(listed))
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes | None:
        """Return an object's content; None if there is no such object."""
        try:
            return self._persist(lambda filesystem, root: bytes(filesystem.cat_file(f"{root}/{name}")))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Make this the content of an object, whether it is there or not."""
        self._writing(
            lambda filesystem, root: filesystem.pipe_file(f"{root}/{name}", content, **_limit(filesystem, len(content)))
        )

    def create(self, name: str, content: bytes) -> bool:
        """Make a new object with this content, all of it at once; return False if there is one of that name.

        Where the answer to a first attempt is lost, the object may be this one.
        """

        def piped(filesystem: Any, root: str) -> bool:
            try:
                _create(filesystem, f"{root}/{name}", content)
            except Exception as error:
                if isinstance(error, FileExistsError) or _code(error) == NO_OBJECT:
                    return False
                raise
            return True

        return self._writing(piped)

    def send(self, file: Path, name: str) -> None:
        """Make the content of a file, which may be large, that of an object."""
        size = file.stat().st_size
        self._writing(
            lambda filesystem, root: filesystem.put_file(str(file), f"{root}/{name}", **_limit(filesystem, size))
        )

    def fetch(self, name: str, file: Path) -> bool:
        """Write an object's content to a file; return False if there is no such object.

        Raises:
            OSError: the disk is full.
        """
        try:
            self._persist(lambda filesystem, root: filesystem.get_file(f"{root}/{name}", str(file)))
        except FileNotFoundError:
            return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; one that is not there is none to delete."""
        for name in names:
            with suppress(FileNotFoundError):
                self._persist(partial(_remove, name))

    def _writing(self, operation: Callable[[Any, str], Result]) -> Result:
        try:
            return self._persist(operation)
        except FileNotFoundError:
            raise UnreachableError(f"{self} cannot be written: there is no such bucket") from None
        except OSError as error:
            raise UnreachableError(f"{self} cannot be written: {error.strerror}") from error

    def _persist(self, operation: Callable[[Any, str], Result]) -> Result:
        """Return what an operation on the filesystem and the path of the URL returns.

        Raises:
            FileNotFoundError: there is no such object, or no such bucket.
            UnreachableError: after the last attempt.
        """
        missing: list[FileNotFoundError] = []

        def attempt() -> Result:
            try:
                try:
                    return operation(*self._opened())
                except PermissionError:
                    self._opened()[0].clear_instance_cache()
                    return operation(*self._opened())
            except FileNotFoundError as error:
                missing.append(error)
                raise LostError.by(error, self.url) from error
            except OSError as error:
                if error.errno in NO_SPACE:
                    raise
                raise self._lost(error) from error
            except Exception as error:
                raise self._lost(error) from error

        try:
            return remote.persist(attempt)
        except remote.UnreachableError as error:
            if missing:
                raise missing[-1] from None
            raise UnreachableError(f"{self} cannot be reached: {error}") from error

    def _lost(self, error: Exception) -> LostError:
        lost = LostError.by(error, self.url)
        code = _code(error)
        return LostError(f"{lost} ({code})", final=lost.final) if code else lost

    def _opened(self) -> tuple[Any, str]:
        filesystem, root = remote.filesystem_of(self.url)
        if "file" in filesystem.protocol:
            filesystem.auto_mkdir = True
        return filesystem, root.rstrip("/")


def _limit(filesystem: Any, size: int) -> dict[str, float]:
    """Return the limit of time in which so many bytes must be written, where fsspec takes one.

    Clients limit the time without an answer, but aiohttp (3.14) forgets that limit when a server says `100 Continue`
    after the bytes were sent: without another, a run would wait for ever for a server that then says no more.
    """
    return {"timeout": ANSWER_SECONDS + size / BYTES_PER_SECOND} if filesystem.async_impl else {}


def _remove(name: str, filesystem: Any, root: str) -> None:
    filesystem.rm_file(f"{root}/{name}")


def _create(filesystem: Any, path: str, content: bytes) -> None:
    """Create an object; `FileExistsError`, or S3's, if there is one."""
    if "file" not in filesystem.protocol:
        filesystem.pipe_file(path, content, mode="create", **_limit(filesystem, len(content)))
        return
    written = f"{path}.{uuid4().hex}"  # a file is not written at once, but a name is given at once
    filesystem.pipe_file(written, content)
    try:
        filesystem.link(written, path)
    finally:
        filesystem.rm_file(written)


def _code(error: BaseException) -> str:
    """Return the code of an error of S3, such as `SlowDown`; empty for any other."""
    response = getattr(error.__cause__ or error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
