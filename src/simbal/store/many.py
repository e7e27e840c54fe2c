"""Many runs in a store: looked at, fetched and brought there several at once, as each of them is mostly waited for."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from simbal.config.check import check_store
from simbal.config.values import check_name
from simbal.errors import UserError
from simbal.files.disk import refusals_of_disk
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec
from simbal.store.bucket import Bucket
from simbal.store.stored_run import StoredRun

AT_ONCE = 8
Item = TypeVar("Item")
Result = TypeVar("Result")


def look_at_stores(specs: Iterable[RunSpec]) -> None:
    """Fetch all but checkpoints of the runs that their stores have further than their folders."""
    _each(StoredRun.look, filter(None, map(StoredRun.of, specs)))


def deliver(runs: Sequence[StoredRun]) -> list[str]:
    """Bring finished runs to their stores; return for each why it could not be brought there, or nothing."""

    def trouble(run: StoredRun) -> str:
        try:
            run.deliver()
        except UserError as error:
            return str(error)
        return ""

    return _each(trouble, runs)


def fetch_runs(url: str, outputs: Path, whole: bool = False) -> Path:
    """Fetch the runs at `<store>/<name>` to `<outputs>/<name>`, and return that folder.

    Args:
        url: of the runs of one name.
        outputs: the folder of all runs on this machine.
        whole: with checkpoints, and also what a finished run's folder lacks.

    Raises:
        UserError: there are none, or the store cannot be reached.
    """
    store, _, name = url.rstrip("/").rpartition("/")
    if not store.partition("://")[2]:
        raise UserError(f"{url} names no runs: give <store>/<name>")
    check_store(store)
    check_name("the name at the end of the URL", name)
    bucket = Bucket(store)
    names = bucket.folders(name)
    if not names:
        raise UserError(f"{url} holds no runs: give <store>/<name>")
    for run in names:
        check_name("a run's name", run)
    folder = outputs / name
    with refusals_of_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
    runs = [StoredRun(bucket, name, RunFolder(folder / run)) for run in names]
    _each(StoredRun.fetch_whole if whole else StoredRun.look, runs)
    return folder


def _each(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    given = [*items]
    if not given:
        return []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [*pool.map(function, given)]
