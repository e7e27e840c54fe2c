"""The history of a run in a store: numbered entries, which say who has the run and which objects are its files.

    <name>/<run>/history/00000007.json   an entry; the last one counts
    <name>/<run>/objects/...             contents of files, each written once under a name of its own
    <name>/<run>/alive/<writer>          changes as long as the writer lives

An entry is created on the condition that its number is free, and never changed. That is all that keeps machines apart:
of two that would write entry 8 one does, and the other finds that the run has gone on without it. So a process that was
paused, and lost the run meanwhile, can add nothing to what came after. The files that an entry names are all there
before it is, so that a reader sees the old files of a run or the new ones, never a mix.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from simbal.errors import UserError
from simbal.runs.record import sealed, unsealed
from simbal.store.bucket import Bucket

CHECKPOINTS = "checkpoints/"
ENTRY = re.compile(r"history/(\d{8})\.json")
OBJECT = re.compile(r"objects/[0-9A-Za-z._-]+")
STEP = re.compile(rf"{CHECKPOINTS}step-(\d+)\.ckpt(/rest\.ckpt)?")  # a file, or a folder of shards
ROUNDS = 10  # of reading while entries are removed as fast


@dataclass(frozen=True)
class Stored:
    """A file of a run: the object that has its content, and by what that is recognised."""

    object: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Entry:
    """An entry of a run's history; the one of number 0 stands for a run that was never stored.

    Args:
        number: its place.
        writer: a name that no other process has, of the one that wrote it.
        free: whether nobody has the run any more; else the writer has it.
        holder: the writer's name for people.
        process: the writer's process id and where that is valid; see `lease.process`.
        status: of the run's record; None: it has none.
        files: the run's, by their paths in its folder.
    """

    number: int = 0
    writer: str = ""
    free: bool = True
    holder: str = ""
    process: tuple[int, str] = (0, "")
    status: str | None = None
    files: Mapping[str, Stored] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.status == "finished"

    @property
    def step(self) -> int:
        """The step of its newest checkpoint; -1 if the run has no files yet."""
        found = [int(named[1]) for named in map(STEP.fullmatch, self.files) if named]
        return max(found, default=0 if self.files else -1)

    @property
    def objects(self) -> set[str]:
        """The names of all objects that it needs."""
        return {stored.object for stored in self.files.values()}


class History:
    """The entries of one run."""

    def __init__(self, bucket: Bucket, run: str) -> None:
        """Take the run `<name>/<run>` of a bucket."""
        self.bucket, self.run = bucket, run

    def __str__(self) -> str:
        return f"{self.bucket}/{self.run}"

    def place(self, name: str) -> str:
        """Return the name in the bucket of one of the run's objects."""
        return f"{self.run}/{name}"

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the run's objects, or of those in one of its folders."""
        return [name.removeprefix(f"{self.run}/") for name in self.bucket.names(self.place(folder).rstrip("/"))]

    def last(self) -> Entry:
        """Return the entry that counts.

        Raises:
            UserError: it is not what was written.
            UnreachableError: the store cannot be reached.
        """
        for _ in range(ROUNDS):
            numbers = [int(found[1]) for found in map(ENTRY.fullmatch, self.names("history")) if found]
            if not numbers:
                return Entry()
            if entry := self.read(max(numbers)):  # else it has been removed, as a newer one is there
                return entry
        raise UserError(f"{self} changes too fast to be read: try again")

    def read(self, number: int) -> Entry | None:
        """Return an entry; None if there is none of that number."""
        content = self.bucket.read(self.place(name_of(number)))
        if content is None:
            return None
        try:
            said = unsealed(content)
            return _entry(number, said)
        except (ValueError, TypeError, KeyError, AttributeError):
            place = f"{self}/{name_of(number)}"
            raise UserError(f"{place} is not what simbal has written: delete {self} to do the run anew") from None

    def append(self, entry: Entry) -> Entry | None:
        """Write the entry after the one that `entry` was made from.

        Returns:
            The entry as it was written; None if another writer has written one, so that the run is not this one's.
        """
        entry = replace(entry, number=entry.number + 1)
        content = (json.dumps(sealed(asdict(entry))) + "\n").encode()
        while not self.bucket.create(self.place(name_of(entry.number)), content):
            found = self.read(entry.number)
            if found is None or found.writer != entry.writer:
                return None
            if found == entry:  # of an attempt whose answer was lost
                break
            return self.append(replace(entry, number=found.number))
        return entry


def name_of(number: int) -> str:
    """Return the name of an entry."""
    return f"history/{number:08}.json"


def _entry(number: int, said: Mapping[str, Any]) -> Entry:
    """Return the entry that says this; `ValueError` for one that names places outside of a run."""
    files = {path: Stored(**about) for path, about in said["files"].items()}
    if said["number"] != number or not all(map(is_inside, files)):
        raise ValueError
    if not all(OBJECT.fullmatch(stored.object) for stored in files.values()):
        raise ValueError
    process = (int(said["process"][0]), str(said["process"][1]))
    return Entry(number, said["writer"], said["free"], said["holder"], process, said["status"], files)


def is_inside(path: str) -> bool:
    """Whether a path is one of a run's folder, and not of its locks or of what is being written."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and "\0" not in path and not any(p.startswith(".") for p in parts)
