"""Brings a run's files to a store, for as long as a process has the run there."""

import hashlib
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from simbal.errors import BusyError
from simbal.store.bucket import UnreachableError
from simbal.store.history import CHECKPOINTS, Entry, History, Stored, name_of

log = logging.getLogger("simbal")
SUFFIX = re.compile(r"\.[a-z]{1,8}")
State = tuple[int, int, int]  # a file's number, size and time of change


class Sending:
    """The entries that one process writes, from the one by which it took the run over.

    First come the objects, each under a name that was never used, then the entry that makes them the run's files; last,
    objects are deleted that no entry needs. A kill in between leaves objects that the next holder deletes.
    """

    def __init__(self, history: History, taken: Entry, leftovers: set[str]) -> None:
        """Go on from an entry of this process's own; `leftovers` are objects that were there before it."""
        self.history, self.entry, self._first = history, taken, taken.number
        self._deletable = leftovers | taken.objects
        self._count = 0
        self._sent: dict[str, tuple[State, Stored]] = {}

    def send(self, files: Mapping[str, Path], status: str | None, free: bool) -> None:
        """Make `files`, by their paths in the run's folder, the run's; `free`: and give the run up.

        Raises:
            BusyError: another process has taken the run over; nothing of this one's is the run's from now on.
            UnreachableError: the store cannot be reached, and has the files that it had.
        """
        stored = {}
        for path, file in files.items():
            with suppress(FileNotFoundError):  # a logger's file that is gone meanwhile
                stored[path] = self._stored(path, file)
        if (stored, status, free) == (self.entry.files, self.entry.status, self.entry.free):
            return
        written = self.history.append(replace(self.entry, files=stored, status=status, free=free))
        if written is None:
            raise BusyError(
                f"{self.history} was taken over by {self.history.last().holder or 'another process'}, as this one gave "
                "no sign of life for too long: the run goes on there"
            )
        before, self.entry = self.entry, written
        if before.number != self._first:  # that one stays, for whoever might still believe that its number is free
            self._deletable.add(name_of(before.number))
        self._delete()

    def _stored(self, path: str, file: Path) -> Stored:
        """Return what the file is in the store, to which it is brought unless it is there."""
        about = file.stat()
        state = about.st_ino, about.st_size, about.st_mtime_ns
        if path in self._sent and self._sent[path][0] == state:
            return self._sent[path][1]
        # a checkpoint is large and never changes; anything else may grow while it is read
        content = None if path.startswith(CHECKPOINTS) else file.read_bytes()
        size = about.st_size if content is None else len(content)
        sha256 = sha256_of(file) if content is None else hashlib.sha256(content).hexdigest()
        stored = self.entry.files.get(path)
        if stored is None or (stored.bytes, stored.sha256) != (size, sha256):
            stored = Stored(self._new_object(file), size, sha256)
            place = self.history.place(stored.object)
            if content is None:
                self.history.bucket.send(file, place)
            else:
                self.history.bucket.write(place, content)
        self._sent[path] = state, stored
        return stored

    def _new_object(self, file: Path) -> str:
        self._count += 1
        suffix = file.suffix if SUFFIX.fullmatch(file.suffix) else ""
        name = f"objects/{self.entry.writer}-{self._count:06}{suffix}"
        self._deletable.add(name)
        return name

    def _delete(self) -> None:
        """Delete what the last entry does not need; what is left is deleted another time, or by the next holder."""
        unneeded = sorted(self._deletable - self.entry.objects)
        try:
            self.history.bucket.delete(map(self.history.place, unneeded))
        except UnreachableError as error:
            log.debug("not deleted: %s", error)
        else:
            self._deletable -= {*unneeded}


def sha256_of(file: Path) -> str:
    """Return the sha256 of a file's content, which may be larger than memory."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
