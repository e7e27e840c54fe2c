"""Failures of a run: out of memory, disk full, diverged, lost rank. Each is recorded as one sentence in record.json.

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
from simbal.errors import UserError
from simbal.metrics.routing import max_vio
from simbal.model.moe import MoELayer
from simbal.model.transformer import Transformer
from simbal.runs.atomic import explain_write_errors
from simbal.runs.folder import RunFolder
from simbal.runs.record import now
from simbal.training.signals import PrunedError, StoppedError

log = logging.getLogger("simbal")
# torch on a CPU and some CUDA libraries raise a plain RuntimeError
OUT_OF_MEMORY = re.compile(r"DefaultCPUAllocator|out of memory|STATUS_ALLOC_FAILED|std::bad_alloc")
LOST_RANK = re.compile(r"gloo|NCCL|Connection (?:closed|reset)|Broken pipe")
RANK_ERROR = "rank.error"  # in the run's folder: the error of the rank that failed first, other than rank zero
WAIT_SECONDS = 2.0  # for RANK_ERROR; Lightning kills rank zero five seconds after another rank has failed


class DivergedError(Exception):
    """Training cannot continue because a loss or gradient is NaN or infinite."""

    def __init__(self, what: str, step: int, layers: list[dict[str, float | None]]) -> None:
        """Store the step and the `layer_statistics` for the record."""
        super().__init__(f"diverged at step {step}: {what} is not finite; a smaller optim.lr may help")
        self.step, self.layers = step, layers


@contextmanager
def record_failures(folder: RunFolder, run: dict[str, Any]) -> Iterator[None]:
    """Write record.json if training ends early within the block: failed, diverged or pruned.

    Args:
        folder: the run's folder.
        run: the entries of the record that are known before training.

    Raises:
        UserError: the run diverged, memory or the disk is full, or another rank failed.
        StoppedError: a signal was received; there is no record, because the run can resume.
        Exception: any other error, which is recorded too.
    """

    def write(status: str, error: str, **more: Any) -> None:
        if is_rank_zero():
            folder.write_record(run | {"status": status, "error": error, **more, "ended": now()})

    try:
        with explain_write_errors(folder.path), out_of_memory_as_user_error():
            yield
    except PrunedError as pruned:
        log.info("%s", pruned)
        write("pruned", str(pruned))
        if is_rank_zero():
            print(pruned)
    except StoppedError as stopped:
        log.info("%s", stopped.sentence)
        if is_rank_zero():
            print(stopped.sentence)
        raise
    except DivergedError as error:
        log.error("%s", error)
        write("diverged", str(error), step=error.step, layers=error.layers)
        raise UserError(str(error)) from None
    except Exception as error:
        log.exception("the run failed")
        message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if not is_rank_zero():
            (folder.path / RANK_ERROR).write_text(f"rank {rank()}: {message}")
            raise
        lost_rank = world_size() > 1 and LOST_RANK.search(message) is not None
        if lost_rank:
            message = _read_rank_error(folder, WAIT_SECONDS) or "a rank was killed, or lost its connection"
        with suppress(UserError):  # on a full disk, report the original error
            write("failed", message)
        if lost_rank:
            raise UserError(message) from error
        raise


def record_killed_worker(folder: RunFolder, run: dict[str, Any], signal_name: str) -> str:
    """Write the record of a run whose worker process was killed, and return the error.

    Rank zero cannot do this, because Lightning kills it after another rank has failed.
    """
    error = _read_rank_error(folder) or f"a process of the run was killed by {signal_name}"
    if folder.valid_record() is None:
        folder.write_record(run | {"status": "failed", "error": error, "ended": now()})
    return error


def _read_rank_error(folder: RunFolder, wait_seconds: float = 0.0) -> str:
    """Return the error of the rank that failed first, or an empty string if it does not appear in time."""
    file, deadline = folder.path / RANK_ERROR, time.monotonic() + wait_seconds
    while not (error := file.read_text() if file.exists() else "") and time.monotonic() < deadline:
        time.sleep(0.1)
    return error


@contextmanager
def out_of_memory_as_user_error() -> Iterator[None]:
    """Raise `UserError` if the block runs out of memory, on a CPU or a GPU."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not OUT_OF_MEMORY.search(str(error)):
            raise
        raise UserError("out of memory: use a smaller trainer.micro_batch, data.seq_len or model") from error


def layer_statistics(model: Transformer, counts_LE: Tensor | None) -> list[dict[str, float | None]]:
    """Return the norms of weights and gradients, the number of non-finite gradients and the load of each MoE layer.

    Args:
        model: after a backward pass, before clipping.
        counts_LE: tokens per expert in the step; None if no micro-batch was finished.
    """
    layers: list[dict[str, float | None]] = []
    moe_layers = [layer for layer in model.feed_forwards if isinstance(layer, MoELayer)]
    for index, moe in enumerate(moe_layers):
        weights = {"router": list(moe.router.parameters()), "experts": [moe.w13_E2FD, moe.w2_EFD, *(moe.biases or ())]}
        if moe.shared is not None:
            weights["shared"] = list(moe.shared.parameters())
        statistics: dict[str, float | None] = {}
        for name, parameters in weights.items():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            nonfinite = [full_tensor((~gradient.isfinite()).sum()) for gradient in gradients]
            statistics[f"{name}/weight_norm"] = _finite_norm(parameters)
            statistics[f"{name}/gradient_norm"] = _finite_norm(gradients)
            statistics[f"{name}/nonfinite_gradients"] = sum(map(int, nonfinite))
        if counts_LE is not None:
            statistics["train/max_vio"] = max_vio(counts_LE[index]).item()
        layers.append(statistics)
    return layers


def _finite_norm(tensors: Iterable[Tensor]) -> float | None:
    norm = full_tensor(nn.utils.get_total_norm(tensors)).item()
    return norm if math.isfinite(norm) else None
