"""Where a study is kept: memory, an SQLite file, a journal file or a database server; and who may write it."""

import fcntl
import hashlib
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from simbal.errors import UserError
from simbal.run_folder import refusals_of_disk

FORMS = "memory, journal:FILE, sqlite:///FILE, or a database's address such as postgresql+psycopg2://user@host/name"
CONNECT_SECONDS = 10
Kind = Literal["memory", "sqlite", "journal", "server"]


@dataclass(frozen=True)
class StudyStorage:
    """A place for studies; `shown` is its name without a password, and all that is ever printed."""

    kind: Kind
    shown: str
    file: Path | None = None
    url: str = ""
    passwords: tuple[str, ...] = ()

    @classmethod
    def read(cls, setting: str) -> "StudyStorage":
        """From the words of `hydra.sweeper.storage`; `UserError` if it is none of `FORMS`."""
        if setting == "memory":
            return cls("memory", "memory")
        scheme, _, rest = setting.partition(":")
        if scheme == "journal" and rest:
            return cls("journal", setting, Path(rest))
        try:
            url = make_url(setting)
        except ArgumentError:
            raise UserError(f"hydra.sweeper.storage is not one of {FORMS}") from None
        if url.get_backend_name() == "sqlite":
            if not url.database or url.database == ":memory:":
                return cls("memory", "memory")
            return cls("sqlite", setting, Path(url.database), setting)
        shown = f"{url.drivername}://{url.host or ''}{f':{url.port}' if url.port else ''}/{url.database or ''}"
        secrets = (url.password, url.query.get("password"))
        return cls("server", shown, None, setting, tuple(str(secret) for secret in secrets if secret))

    @property
    def shared(self) -> bool:
        """Whether several machines may work on one of its studies at once."""
        return self.kind in ("journal", "server")

    def exists(self) -> bool:
        """Whether something may be kept here already."""
        return self.kind == "server" or (self.file is not None and self.file.exists())

    def open(self) -> BaseStorage:
        """Connect, and make what is not there yet; `UserError` if that fails."""
        if self.kind == "memory":
            return InMemoryStorage()
        if self.file is not None:
            with self.errors(), refusals_of_disk(self.file.parent):
                self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.errors():
            if self.kind == "journal":
                return JournalStorage(JournalFileBackend(str(self.file)))
            if self.kind == "sqlite":
                return RDBStorage(self.url, engine_kwargs={"connect_args": {"timeout": 60}})
            patience = {"connect_timeout": CONNECT_SECONDS} if self.url.startswith("postgresql") else {}
            return RDBStorage(self.url, engine_kwargs={"pool_pre_ping": True, "connect_args": patience})

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn what goes wrong with the storage into one sentence without its password."""
        try:
            yield
        except UserError:
            raise
        except ImportError as error:
            hint = ": pip install psycopg2-binary" if "psycopg2" in self.url or "psycopg2" in str(error) else ""
            raise UserError(f"the study's storage {self.shown} needs a driver that is not installed{hint}") from None
        except (StorageInternalError, SQLAlchemyError, OSError, RuntimeError) as error:
            raise UserError(f"cannot use the study's storage {self.shown}: {self._reason(error)}") from None
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            if self.kind != "journal":
                raise
            reason = f"{type(error).__name__}: {self._reason(error)}"
            raise UserError(f"the study's storage {self.shown} is broken ({reason}): move it away") from None

    def _reason(self, error: BaseException) -> str:
        """The first line of what the driver said."""
        cause = error
        while isinstance(cause, StorageInternalError) and cause.__cause__ is not None:
            cause = cause.__cause__
        original = getattr(cause, "orig", None) or cause
        text = " ".join(str(original).split()) or type(original).__name__
        text = text.replace(self.url, self.shown) if self.url else text
        for password in self.passwords:
            text = text.replace(password, "***").replace(quote(password), "***")
        return text

    @contextmanager
    def lock(self, study: str) -> Iterator[None]:
        """Hold a study for this process, against others on this machine; `UserError` if one of them has it.

        An SQLite file belongs to one machine. Of a journal or a server every machine has a lock of its own.
        """
        if self.kind == "memory":
            yield
            return
        place = self._lock_file(study)
        with self.errors(), refusals_of_disk(place.parent):
            place.parent.mkdir(parents=True, exist_ok=True)
            file = place.open("a+")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise UserError(
                    f"the study {study} in {self.shown} is being run by {holder}: wait for it, or choose another name="
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield

    def _lock_file(self, study: str) -> Path:
        where = "" if self.kind == "sqlite" else f"{socket.gethostname()} {self.shown} "
        digest = hashlib.sha256(f"{where}{study}".encode()).hexdigest()[:16]
        if self.file is not None:
            return self.file.with_name(f".{self.file.name}-{digest}.lock")
        return Path(tempfile.gettempdir(), f"simbal-{os.getuid()}-{digest}.lock")
