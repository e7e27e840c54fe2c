"""How a run ends before its last step: one sentence for the user, and `failed`, `diverged` or `pruned` in its record.

Shapes: L MoE layers, E experts.
"""

import logging
import math
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from simbal.distributed import full_tensor, is_rank_zero, rank, world_size
from simbal.errors import BusyError, UserError
from simbal.metrics.routing import max_vio
from simbal.model.moe import MoELayer
from simbal.model.transformer import Transformer
from simbal.runs.atomic import explain_write_errors
from simbal.runs.folder import RunFolder
from simbal.runs.record import now
from simbal.training.signals import PrunedError, StoppedError

log = logging.getLogger("simbal")
# how torch reports it on a CPU, and some CUDA libraries: as a plain RuntimeError
OUT_OF_MEMORY = re.compile(r"DefaultCPUAllocator|out of memory|STATUS_ALLOC_FAILED|std::bad_alloc")
LOST_RANK = re.compile(r"gloo|NCCL|Connection (?:closed|reset)|Broken pipe")
RANK_ERROR = "rank.error"  # in the run's folder: why another rank than rank zero failed
WAIT_SECONDS = 2.0  # for that file; Lightning kills rank zero five seconds after another rank has failed


class DivergedError(Exception):
    """Training cannot continue because a loss or gradient is NaN or infinite."""

    def __init__(self, what: str, step: int, layers: list[dict[str, float | None]]) -> None:
        """Keep the step and the statistics of each MoE layer; None for a number that is not finite."""
        super().__init__(f"diverged: {what} is not finite in step {step}; a smaller optim.lr may help")
        self.step, self.layers = step, layers


@contextmanager
def recorded(folder: RunFolder, run: dict[str, Any]) -> Iterator[None]:
    """Record how training ended within the block, if it did not reach its last step; rank zero writes.

    Args:
        folder: the run's folder.
        run: the entries of its record that are known in any case.

    Raises:
        UserError: the run diverged, memory or the disk is full, or another rank failed.
        StoppedError: a signal came; there is no record, as the run can resume.
        BusyError: another process has taken the run over, and records its end.
        Exception: any other error is recorded and raised again.
    """
    try:
        with explain_write_errors(folder.path), memory_errors():
            yield
    except PrunedError as stop:
        log.info("%s", stop)
        _write(folder, run | {"status": "pruned", "error": str(stop)})
        _print(stop)
    except StoppedError as stop:
        log.info("%s", stop.sentence)
        _print(stop.sentence)
        raise
    except BusyError as busy:
        log.error("%s", busy)
        raise
    except DivergedError as end:
        log.error("%s", end)
        _write(folder, run | {"status": "diverged", "error": str(end), "step": end.step, "layers": end.layers})
        raise UserError(str(end)) from None
    except Exception as error:
        log.exception("the run failed")
        sentence = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if not is_rank_zero():
            (folder.path / RANK_ERROR).write_text(f"rank {rank()}: {sentence}")
            raise
        lost = _lost_rank(folder, sentence) if world_size() > 1 else None
        with suppress(UserError):  # where nothing more can be written, the first error is the one to show
            _write(folder, run | {"status": "failed", "error": lost or sentence})
        if lost:
            raise UserError(lost) from error
        raise


def record_lost_worker(folder: RunFolder, run: dict[str, Any], signal_name: str) -> str:
    """Record the failure of a run of several ranks whose process was killed, and return the error.

    Rank zero cannot: Lightning kills it once another rank has failed.
    """
    error = _rank_error(folder) or f"a process of the run was killed by {signal_name}"
    if folder.valid_record() is None:
        folder.write_record(run | {"status": "failed", "error": error, "ended": now()})
    return error


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise `UserError` where memory runs out within the block."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not OUT_OF_MEMORY.search(str(error)):
            raise
        raise UserError("out of memory: use a smaller trainer.micro_batch, data.seq_len or model") from error


def layer_statistics(model: Transformer, counts_LE: Tensor | None) -> list[dict[str, float | None]]:
    """Return, for each MoE layer, the norms of weights and gradients, the number of nonfinite gradients, and the load.

    Args:
        model: after a backward pass, before clipping.
        counts_LE: tokens per expert in the step, (layers, experts); None if no micro-batch was finished.
    """
    found: list[dict[str, float | None]] = []
    moe_layers = [layer for layer in model.feed_forwards if isinstance(layer, MoELayer)]
    for layer, moe in enumerate(moe_layers):
        weights = {"router": list(moe.router.parameters()), "experts": [moe.w13_E2FD, moe.w2_EFD, *(moe.biases or ())]}
        if moe.shared is not None:
            weights["shared"] = list(moe.shared.parameters())
        statistics: dict[str, float | None] = {}
        for name, parameters in weights.items():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            nonfinite = [full_tensor((~gradient.isfinite()).sum()) for gradient in gradients]
            statistics |= {
                f"{name}/weight_norm": _norm(parameters),
                f"{name}/gradient_norm": _norm(gradients),
                f"{name}/nonfinite_gradients": sum(map(int, nonfinite)),
            }
        if counts_LE is not None:
            statistics["train/max_vio"] = max_vio(counts_LE[layer]).item()
        found.append(statistics)
    return found


def _norm(tensors: Iterable[Tensor]) -> float | None:
    norm = full_tensor(nn.utils.get_total_norm(tensors)).item()
    return norm if math.isfinite(norm) else None


def _print(text: object) -> None:
    if is_rank_zero():
        print(text)


def _write(folder: RunFolder, record: dict[str, Any]) -> None:
    if is_rank_zero():
        folder.write_record(record | {"ended": now()})


def _lost_rank(folder: RunFolder, sentence: str) -> str | None:
    """Return the error of the rank that failed first, or None if rank zero failed for a reason of its own."""
    if not LOST_RANK.search(sentence):
        return None
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := _rank_error(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found or "a rank was killed, or lost its connection"


def _rank_error(folder: RunFolder) -> str | None:
    with suppress(OSError):
        return (folder.path / RANK_ERROR).read_text()
    return None
