"""How a run ended that did not reach its last step: what its record says, and what its user is told."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from simbal.errors import UserError
from simbal.run_folder import RunFolder
from simbal.training import failure
from simbal.training.divergence import DivergedError
from simbal.training.ranks import is_first
from simbal.training.record import now
from simbal.training.shortage import shortage
from simbal.training.stop import StoppedError
from simbal.training.trial_pruning import PrunedError

log = logging.getLogger("simbal")


@contextmanager
def recorded(folder: RunFolder, run: dict[str, Any], trainer: Mapping[str, Any]) -> Iterator[None]:
    """Write it down, if training ends here.

    Args:
        folder: the run's.
        run: what its record says of it in any case.
        trainer: the config's group of that name.

    Of several ranks, the first alone writes.

    Raises:
        UserError: the run has diverged, or was short of memory, disk space or open files.
        StoppedError: a signal came; there is no record then, as the run is to go on.
        Exception: any other error is recorded and passed on.
    """
    try:
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
        short = shortage(error, folder.path, trainer["micro_batch"], trainer["global_batch"] // trainer["devices"])
        own = {"cause": short.cause, "error": short.sentence} if short else {"error": _named(error)}
        other = failure.heard(own)
        says = other or own
        with suppress(UserError):  # where nothing more can be written, the first error is the one to tell
            _write(folder, run, {"status": "failed", **says})
        if "cause" in says:
            raise UserError(says["error"]) from error
        if other:
            raise RuntimeError(says["error"]) from error
        raise


def _write(folder: RunFolder, run: dict[str, Any], how: dict[str, Any]) -> None:
    if is_first():
        folder.write_record(run | how | {"ended": now()})


def _named(error: Exception) -> str:
    said = f"{type(error).__name__}: {error}"
    return said if is_first() else f"rank {dist.get_rank()}: {said}"
