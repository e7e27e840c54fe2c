"""The storage of studies, which is Optuna's own: an SQLite file by default, a journal file, memory or a database."""

from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path

from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from simbal.errors import UserError

FORMS = "memory, journal:FILE, sqlite:///FILE or the URL of another database"


def open_storage(setting: str) -> BaseStorage:
    """Open the storage that `hydra.sweeper.storage` names; a file that does not exist yet is created."""
    if setting == "memory":
        return InMemoryStorage()
    if setting.startswith("journal:"):
        return JournalStorage(JournalFileBackend(setting.removeprefix("journal:")))
    return RDBStorage(setting)


def storage_exists(setting: str) -> bool:
    """Whether the storage may hold studies already."""
    kind, _, rest = setting.partition(":")
    return kind != "memory" and (kind not in ("journal", "sqlite") or Path(rest.removeprefix("///")).exists())


def format_storage(setting: str) -> str:
    """Return the storage's name without its password; `UserError` if it is none of `FORMS`."""
    if setting == "memory" or (setting.startswith("journal:") and setting != "journal:"):
        return setting
    try:
        return make_url(setting).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):  # ValueError: the port is not a number
        raise UserError(f"hydra.sweeper.storage is not one of {FORMS}") from None


@contextmanager
def storage_errors(shown: str) -> Iterator[None]:
    """Raise errors of the storage within the block as a `UserError`."""
    try:
        yield
    except (StorageInternalError, SQLAlchemyError, JSONDecodeError, ModuleNotFoundError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
        reason = " ".join(str(getattr(cause, "orig", None) or cause).split())
        raise UserError(f"cannot use the study's storage {shown}: {reason}") from None
