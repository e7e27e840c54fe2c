"""The endings of a run before its last step, as its record and its user's terminal get them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from simbal.distributed import is_first
from simbal.errors import UserError
from simbal.files.disk import refusals_of_disk
from simbal.runs.folder import RunFolder
from simbal.training.failures import DivergedError, memory_errors
from simbal.training.ranks import Ranks
from simbal.training.record import now
from simbal.training.stop import PrunedError, StoppedError

log = logging.getLogger("simbal")


@contextmanager
def recorded(folder: RunFolder, run: dict[str, Any], ranks: Ranks) -> Iterator[None]:
    """Record how training ended within the block, if it did not reach its last step; the first of several ranks writes.

    Args:
        folder: the run's folder.
        run: the entries of its record that are known in any case.
        ranks: the ranks that train together, which report to the first why they failed.

    Raises:
        UserError: the run has diverged, memory or the disk is full, or another rank has failed.
        StoppedError: a signal came; there is no record then, as the run is to go on.
        Exception: any other error is recorded and passed on.
    """
    try:
        with refusals_of_disk(folder.path), memory_errors():
            yield
    except PrunedError as stop:
        log.info("%s", stop)
        _write(folder, run, {"status": "pruned", "error": str(stop)})
        print(stop)
    except StoppedError as stop:
        log.info("%s", stop.sentence)
        print(stop.sentence)
        raise
    except DivergedError as end:
        log.error("%s", end)
        how = {"status": "diverged", "error": str(end), "step": end.step, "layers": end.layers}
        _write(folder, run, how)
        raise UserError(str(end)) from None
    except Exception as error:
        log.exception("the run failed")
        own, other = _sentence(error), None
        if is_first():
            other = ranks.failure_of_others()
        else:
            ranks.report_failure(own)
        with suppress(UserError):  # where nothing more can be written, the first error is the one to show
            _write(folder, run, {"status": "failed", "error": other or own})
        if other:
            raise UserError(other) from error
        raise


def _write(folder: RunFolder, run: dict[str, Any], how: dict[str, Any]) -> None:
    if is_first():
        folder.write_record(run | how | {"ended": now()})


def _sentence(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    said = f"{type(error).__name__}: {error}"
    return said if is_first() else f"rank {dist.get_rank()}: {said}"
