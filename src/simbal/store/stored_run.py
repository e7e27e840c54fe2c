"""One run in a store and in its folder on this machine: fetched, held by one process at a time, and brought away."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from simbal.errors import BusyError, UserError
from simbal.runs.folder import CONFIG_FILE, CONSOLE_FILE, PRUNE_FILE, RECORD_FILE, RunFolder
from simbal.runs.progress import PROGRESS_FILE
from simbal.runs.spec import RunSpec
from simbal.store import lease
from simbal.store.bucket import Bucket, UnreachableError
from simbal.store.fetching import fetch, has
from simbal.store.history import CHECKPOINTS, STEP, Entry, History, is_inside
from simbal.store.sending import Sending

log = logging.getLogger("simbal")
OF_THIS_MACHINE = (CONSOLE_FILE, PROGRESS_FILE, PRUNE_FILE)


class StoredRun:
    """A run in a store.

    What is in the store and what is in the folder are states of the same run, so that the one that is further counts:
    one that is finished, else the one with the later checkpoint.
    """

    def __init__(self, bucket: Bucket, name: str, folder: RunFolder) -> None:
        """Take a run's folder, and the sweep's `name` below which the store has it."""
        self.folder = folder
        self.history = History(bucket, f"{name}/{folder.path.name}")
        self.troubles: list[str] = []  # sentences on checkpoints that could not be brought away
        self._watch = lease.Watch(self.history)
        self._looked = -lease.LOOK_SECONDS
        self._holder = ""
        self._sending: Sending | None = None

    @classmethod
    def of(cls, spec: RunSpec) -> "StoredRun | None":
        """Return the run in the store that its config names, or None if it names none."""
        if spec.config.store is None:
            return None
        return cls(Bucket(spec.config.store), spec.config.name, RunFolder(spec.path))

    def look(self) -> None:
        """Fetch all but checkpoints, where the store is further than the folder; a run that is in use here stays."""
        self._look(lambda entry: self._further(entry, ended=True))

    def look_for_end(self) -> None:
        """Fetch the same of a run that is finished, and nothing of another."""
        self._look(lambda entry: entry.finished and self._further(entry))

    def _look(self, wanted: Callable[[Entry], bool]) -> None:
        entry = self.history.last()
        if wanted(entry):
            with suppress(BusyError), self.folder.lock():
                self._fetch(entry, wanted, lambda path: not path.startswith(CHECKPOINTS))

    def fetch_whole(self) -> None:
        """Fetch what the folder has not, checkpoints too; `BusyError` if the run is in use here."""

        def wanted(entry: Entry) -> bool:
            behind = self._further(entry, ended=True)
            same = RECORD_FILE in entry.files and has(self.folder.path / RECORD_FILE, entry.files[RECORD_FILE])
            return behind or (same and any(not has(self.folder.path / path, it) for path, it in entry.files.items()))

        with self.folder.lock():
            self._fetch(self.history.last(), wanted, lambda path: True)

    def holder(self) -> str:
        """Return who has the run in the store, for people; empty if it is free. Not every call asks the store."""
        if time.monotonic() - self._looked >= lease.LOOK_SECONDS:
            entry = self.history.last()
            self._looked, self._holder = time.monotonic(), ""
            if self._watch.is_held(entry):
                self._holder = entry.holder
            elif not entry.free:  # so that whoever is given the run need not wait for the same silence
                self.history.append(replace(entry, writer=lease.new_writer(), free=True))
        return self._holder

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have the run within the block, with all of its files; at the end bring it away, however it ended.

        Raises:
            BusyError: another process has it, or has taken it over from this one.
            UnreachableError: the store cannot be reached at the beginning.
            UserError: the run came to its end, and could not be brought away.
        """
        writer = lease.new_writer()
        with lease.beating(self.history, writer):
            leftovers, entry = self._take(writer)
            self._sending = Sending(self.history, entry, leftovers)
            try:
                self._fetch(entry, self._further, lambda path: entry.finished or path != RECORD_FILE)
                yield
            except BaseException as error:
                if not isinstance(error, BusyError):
                    self._leave_after(error)
                raise
            else:
                self._leave()
            finally:
                self._sending = None

    def bring_away(self) -> None:
        """Bring the files to the store as they are; where it cannot be reached, warn and keep them for the next time.

        Raises:
            BusyError: another process has taken the run over.
        """
        try:
            self._send(free=False)
        except UnreachableError as error:
            trouble = f"a checkpoint could not be brought to the store: {error}"
            log.warning("%s", trouble)
            print(f"warning: {trouble}")
            if trouble not in self.troubles:
                self.troubles.append(trouble)

    def deliver(self) -> None:
        """Bring a finished run to the store if that does not have it as such.

        Raises:
            UserError: it could not be brought away.
            BusyError: another process is at it.
        """
        if not self.history.last().finished:
            with self.folder.lock(), self.held():
                pass

    def _take(self, writer: str) -> tuple[set[str], Entry]:
        """Take the run over once it is free; return what earlier holders may have left, and the entry that says so.

        Raises:
            BusyError: its holder gives signs of life.
        """
        watch = lease.Watch(self.history)
        while True:
            leftovers = {name for name in self.history.names() if not name.startswith("history/")}
            entry = self.history.last()
            if watch.is_held(entry):
                if watch.moved:
                    raise BusyError(f"{self.history} is being written by {entry.holder}")
                time.sleep(lease.LOOK_SECONDS)
                continue
            mine = replace(entry, writer=writer, free=False, holder=lease.holder(), process=lease.process())
            if taken := self.history.append(mine):
                self._require_refusal(taken)
                return leftovers, taken

    def _require_refusal(self, entry: Entry) -> None:
        """Raise `UserError` for a store that creates an object twice, as some that speak S3 do: it keeps nobody out."""
        if self.history.append(replace(entry, number=entry.number - 1, writer="nobody", free=True)) is not None:
            raise UserError(
                f"store={self.history.bucket} creates an object that is there already (it ignores If-None-Match), and "
                "could not keep two machines from one run: choose another"
            )

    def _leave(self) -> None:
        try:
            self._send(free=True)
        except UnreachableError as error:
            raise UserError(
                f"{self.folder.path} has come to its end, and could not be brought away: {error}; "
                "the same command tries again, and trains nothing anew"
            ) from error

    def _leave_after(self, error: BaseException) -> None:
        """Bring away what a run has left that ended by `error`, which is the one to be told."""
        try:
            self._send(free=True)
        except (UserError, OSError) as trouble:
            log.warning("not brought away: %s", trouble)
            print(f"warning: {self.folder.path} could not be brought away: {trouble}", file=sys.stderr)

    def _send(self, free: bool) -> None:
        assert self._sending
        record = self.folder.whole_record()
        files = {name: self.folder.path / name for name in self._files()}
        self._sending.send(files, record["status"] if record else None, free)

    def _files(self) -> list[str]:
        """Return the paths of the files that are brought away, in the run's folder."""
        root = self.folder.path
        found = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
        names = sorted(path.relative_to(root).as_posix() for path in found)
        return [name for name in names if is_inside(name) and name not in OF_THIS_MACHINE]

    def _fetch(self, entry: Entry, wanted: Callable[[Entry], bool], chosen: Callable[[str], bool]) -> None:
        """Fetch the chosen paths of the entry, or of a later one, as long as it is wanted."""
        while wanted(entry):
            if fetch(self.history, entry, [*filter(chosen, entry.files)], self.folder.path):
                return
            before, entry = entry, self.history.last()
            if entry.number == before.number:
                raise UserError(f"{self.history} lacks a file that its history names: the run cannot be fetched")

    def _further(self, entry: Entry, ended: bool = False) -> bool:
        """Whether the run of an entry is further than that of the folder; `ended`: a record counts for something."""
        record = self.folder.whole_record()
        finished = record is not None and record["status"] == "finished"
        steps = [int(named[1]) for named in map(STEP.fullmatch, self._files()) if named]
        step = max(steps, default=0 if (self.folder.path / CONFIG_FILE).exists() else -1)
        there = (entry.finished, entry.step, ended and entry.status is not None)
        return there > (finished, step, ended and record is not None)
