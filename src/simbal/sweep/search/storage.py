"""The storage of studies: memory, an SQLite file, a journal file or a database server; and the lock of each study."""

import hashlib
import os
import socket
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, InterfaceError, OperationalError, SQLAlchemyError

from simbal.config.values import require_no_credentials
from simbal.errors import BusyError, UserError
from simbal.files.disk import refusals_of_disk
from simbal.files.locks import LEASE_SECONDS, Lock, TakenError

FORMS = "memory, journal:FILE, sqlite:///FILE, or a database's address such as postgresql+psycopg2://host/name"
CONNECT_SECONDS = 10
LONGEST_REASON = 300  # characters
SAFE = "/:@,=+()[]!~ "  # signs of a path that mean nothing in the address of an SQLite file
# errors of SQLite about a file that it cannot use now; all its other errors are about the content
TROUBLE = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL,
}  # fmt: skip
BEGINNING = b'{"op_code":'  # begins every line of a journal
Kind = Literal["memory", "sqlite", "journal", "server"]


class DamagedStudyError(UserError):
    """The content of a study is not what a search has written, or not what the runs' folders say."""

    def __init__(self, damage: str, way_out: str) -> None:
        super().__init__(f"{damage}: {way_out}")
        self.damage = damage


class ContentError(ValueError):
    """The content of a storage is wrong; the message says what, in a few words."""


@dataclass(frozen=True)
class StudyStorage:
    """A storage of studies; `shown` is its name."""

    kind: Kind
    shown: str
    file: Path | None = None
    url: str = ""

    @classmethod
    def read(cls, setting: str) -> "StudyStorage":
        """Return the storage that `hydra.sweeper.storage` names; `UserError` if it is none of `FORMS`."""
        if setting == "memory":
            return cls("memory", "memory")
        scheme, _, rest = setting.partition(":")
        if scheme == "journal" and rest:
            return cls("journal", setting, Path(rest))
        require_no_credentials("hydra.sweeper.storage", setting)
        try:
            url = make_url(setting)
        except (ArgumentError, ValueError):  # the latter of a port
            raise UserError(f"hydra.sweeper.storage is not one of {FORMS}") from None
        if url.get_backend_name() == "sqlite":
            if not url.database or url.database == ":memory:":
                return cls("memory", "memory")
            if "uri" in url.query:
                raise UserError(f"hydra.sweeper.storage is not one of {FORMS}: uri= is not understood here")
            return cls("sqlite", setting, Path(url.database), setting)
        return cls("server", setting, None, setting)

    @classmethod
    def in_file(cls, file: Path) -> "StudyStorage":
        """Return the storage in an SQLite file, whatever signs its path has."""
        return cls.read(f"sqlite:///{quote(str(file), safe=SAFE)}")

    def beside(self, suffix: str) -> "StudyStorage":
        """Return a storage in a file of the same kind beside this one, whose name ends in `.suffix`."""
        assert self.file is not None
        file = self.file.with_name(f"{self.file.name}.{suffix}")
        if self.kind == "sqlite":
            return StudyStorage.in_file(file)
        return replace(self, shown=f"journal:{file}", file=file)

    @property
    def shared(self) -> bool:
        """Whether several machines may work on one of its studies at once."""
        return self.kind in ("journal", "server")

    def exists(self) -> bool:
        """Whether something may be kept here already."""
        return self.kind == "server" or (self.file is not None and self.file.exists())

    def open(self) -> BaseStorage:
        """Connect, and make what is not there yet.

        Within `translate_errors` or `content`, what goes wrong becomes one sentence.
        """
        if self.kind == "memory":
            return InMemoryStorage()
        if self.file is not None:
            with refusals_of_disk(self.file.parent):
                self.file.parent.mkdir(parents=True, exist_ok=True)
            if self.kind == "journal":
                return open_journal(self.file)
        url = self.url.replace("{", "{{").replace("}", "}}")  # Optuna takes them for a template's
        if self.kind == "server":
            timeouts = {"connect_timeout": CONNECT_SECONDS} if self.url.startswith("postgresql") else {}
            return RDBStorage(url, engine_kwargs={"pool_pre_ping": True, "connect_args": timeouts})
        opened = RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})
        _require_whole(opened)
        return opened

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Raise the errors of the storage within the block as a `UserError`, one sentence."""
        try:
            yield
        except UserError:
            raise
        except ImportError as error:
            hint = ": pip install psycopg2-binary" if "psycopg2" in self.url or "psycopg2" in str(error) else ""
            raise UserError(f"the study's storage {self.shown} needs a driver that is not installed{hint}") from None
        except (StorageInternalError, SQLAlchemyError, OSError, RuntimeError) as error:
            raise UserError(f"cannot use the study's storage {self.shown}: {self._reason(error)}") from None
        except (ValueError, KeyError, TypeError, AssertionError) as error:  # raised by what another machine has written
            if self.kind != "journal":
                raise
            raise self._damaged("the study", error) from error

    @contextmanager
    def content(self, study: str) -> Iterator[None]:
        """Raise errors as `translate_errors` does, in a block that only reads a study.

        Any other error there is damage to what the storage holds.

        Raises:
            DamagedStudyError: the study cannot be read, or is not what a search has written.
        """
        with self.translate_errors():
            try:
                yield
            except (UserError, ImportError, OSError):
                raise
            except Exception as error:
                if self._is_trouble(_cause(error)):
                    raise
                raise self._damaged(f"the study {study}", error) from error

    def _is_trouble(self, cause: BaseException) -> bool:
        """Whether an error is about the file or the connection, and not about what is kept there."""
        if self.kind == "sqlite":
            return getattr(_driver_error(cause), "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF in TROUBLE
        return isinstance(cause, OperationalError | InterfaceError | ArgumentError | RuntimeError)

    def _damaged(self, study: str, error: Exception) -> DamagedStudyError:
        way_out = "choose another hydra.sweeper.study_name, or delete it with optuna delete-study"
        if self.file is not None:
            aside = f"keeps the file as {self.file.name}.damaged and rebuilds the study from its runs' folders"
            way_out = f"hydra.sweeper.take_over=true {aside}"
        return DamagedStudyError(f"{study} in {self.shown} is damaged ({self._reason(error)})", way_out)

    def _reason(self, error: BaseException) -> str:
        """Return what the driver said, in one line."""
        original = _driver_error(_cause(error))
        text = str(original)
        text = " ".join(text.split())[:LONGEST_REASON]
        foreign = not isinstance(original, OSError | RuntimeError | sqlite3.Error | SQLAlchemyError)
        named = foreign and type(original).__module__ == "builtins"  # "KeyError: 'op_code'" says more than "'op_code'"
        return f"{type(original).__name__}: {text}" if named or not text else text

    @contextmanager
    def lock(self, study: str) -> Iterator[None]:
        """Hold a study for this process within the block, against others on this machine.

        An SQLite file belongs to one machine. For a journal or a server every machine has its lock.

        Raises:
            BusyError: another process has it.
            UserError: the lock cannot be held.
        """
        with ExitStack() as held:
            if self.kind != "memory":
                file = self.lock_file(study)
                with refusals_of_disk(file.parent):
                    file.parent.mkdir(parents=True, exist_ok=True)
                try:
                    held.enter_context(Lock(file).held(2 * LEASE_SECONDS))
                except TakenError as holder:
                    said = f"the study {study} in {self.shown} is being run by {holder}"
                    raise BusyError(f"{said}: wait for it, or choose another name=") from None
                except OSError as error:
                    raise UserError(f"{file} cannot be the lock of the study {study}: {error.strerror}") from None
            yield

    def lock_file(self, study: str) -> Path:
        """Return the path of a study's lock.

        It is beside the file, or in a folder for temporary files into which nobody else can put one.
        """
        where = "" if self.kind == "sqlite" else f"{socket.gethostname()} {self.shown} "
        digest = hashlib.sha256(f"{where}{study}".encode()).hexdigest()[:16]
        if self.file is not None:
            return self.file.with_name(f".{self.file.name}-{digest}.lock")
        return _private_folder() / f"{digest}.lock"


class WholeLines(JournalFileSymlinkLock):
    """Optuna's lock of a journal, whose holder writes behind a whole line.

    Every writer holds it while it writes, so that half a line that stands there under the lock is of one that was
    killed. Optuna would write behind it and make of both a line that nobody can read again. What the half line said is
    lost, as if the kill had come before it.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self.file = file

    def acquire(self) -> bool:
        """Wait for the lock, then cut the file back to its last whole line."""
        acquired = super().acquire()
        try:
            _cut_half_line(self.file)
        except BaseException:
            self.release()
            raise
        return acquired


def open_journal(file: Path) -> JournalStorage:
    """Return the storage in a journal file, which is made if it is not there."""
    return JournalStorage(JournalFileBackend(str(file), lock_obj=WholeLines(file)))


def _private_folder() -> Path:
    folder = Path(tempfile.gettempdir(), f"simbal-{os.getuid()}")
    with refusals_of_disk(folder.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(f"{folder} is not a folder of yours alone, so that no lock can be kept there: set TMPDIR")
    return folder


def _require_whole(opened: RDBStorage) -> None:
    """Raise `ContentError` for an SQLite file with damage that a look at one study may not meet."""
    with opened.engine.connect() as connection:
        said = connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar()
        if said != "ok":
            raise ContentError(said)
        orphan = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
        if orphan is not None:
            raise ContentError(f"a row of {orphan[0]} belongs to none of {orphan[2]}")
        foreign = connection.exec_driver_sql("SELECT type FROM sqlite_master WHERE type IN ('view', 'trigger')").first()
        if foreign is not None:
            raise ContentError(f"it has a {foreign[0]}, which no study has")


def _cause(error: BaseException) -> BaseException:
    while isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _driver_error(cause: BaseException) -> BaseException:
    """Return the error of the driver, where SQLAlchemy has one."""
    return getattr(cause, "orig", None) or cause


def _cut_half_line(file: Path) -> None:
    """Cut a journal file back to its last whole line.

    Raises:
        ValueError: it has no whole line and does not begin as a journal does.
    """
    with file.open("r+b") as opened:
        size = os.fstat(opened.fileno()).st_size
        if not size:  # which cannot be mapped
            return
        with mmap(opened.fileno(), size, access=ACCESS_READ) as content:
            whole, beginning = content.rfind(b"\n") + 1, content[: len(BEGINNING)]
        if whole == 0 and not BEGINNING.startswith(beginning):
            raise ValueError("it is no journal")
        if whole < size:
            opened.truncate(whole)
            os.fsync(opened.fileno())
