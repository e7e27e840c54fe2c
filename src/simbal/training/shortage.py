"""Recognises that a run failed for want of memory, disk space or open files, and says what to change."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from simbal.config.check import divisors
from simbal.errors import UserError
from simbal.files.disk import DISK_REFUSES, refusal

DISK = {*DISK_REFUSES} - {errno.ENOENT}  # once a run has begun, a file that is missing is another matter
OPEN_FILES = (errno.EMFILE, errno.ENFILE)
# how libraries report it in a RuntimeError, without an error number
MEMORY_SAID = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA (driver )?error: out of memory|CUDA out of memory"
    r"|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|std::bad_alloc|Cannot allocate memory"
)
ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ([kKMGT]i?B|bytes)")


@dataclass(frozen=True)
class Shortage:
    """A resource that ran short: `cause` is a word for programs, `sentence` tells a user what to change."""

    cause: Literal["memory", "disk", "open files"]
    sentence: str


def shortage(error: BaseException, folder: Path, micro_batch: int, global_batch: int) -> Shortage | None:
    """Return the resource that `error`, or an error behind it, was short of; None if it was nothing that can run short.

    Args:
        error: the one that ended the run.
        folder: the run's, which it writes.
        micro_batch: sequences, as `trainer.micro_batch`.
        global_batch: sequences, as `trainer.global_batch`.
    """
    for hidden in _chain(error):
        number = hidden.errno if isinstance(hidden, OSError) else None
        if number in OPEN_FILES or "Too many open files" in str(hidden):
            return Shortage("open files", f"too many open files{_named(hidden)}: allow more with `ulimit -n`")
        if _is_of_memory(hidden):
            return Shortage("memory", _out_of_memory(hidden, micro_batch, global_batch))
        if number in DISK:
            assert isinstance(hidden, OSError)
            said = str(error) if isinstance(error, UserError) else refusal(folder, hidden)  # it may have been said
            return Shortage("disk", said)
    return None


@contextmanager
def room_for_a_model() -> Iterator[None]:
    """Raise `UserError` where memory runs out while a model is made within the block.

    No smaller micro-batch helps there.
    """
    try:
        yield
    except Exception as error:
        short = next((hidden for hidden in _chain(error) if _is_of_memory(hidden)), None)
        if short is None:
            raise
        says = f"{_where(short)} has no room for the model{_asked(short)}: use a smaller model"
        raise UserError(says) from None


def smaller_micro_batches(micro_batch: int, global_batch: int) -> list[int]:
    """Return the smaller values of `trainer.micro_batch`, the largest first; each divides the global batch."""
    return [size for size in reversed(divisors(global_batch)) if size < micro_batch]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, and every one that it came from or that was being handled when it was raised."""
    waiting, seen = [error], set()
    while waiting:
        current = waiting.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += [other for other in (current.__cause__, current.__context__) if other is not None]


def _is_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and MEMORY_SAID.search(str(error)) is not None


def _out_of_memory(error: BaseException, micro_batch: int, global_batch: int) -> str:
    ran_out = f"{_where(error)} ran out of memory with trainer.micro_batch={micro_batch}{_asked(error)}"
    if smaller := smaller_micro_batches(micro_batch, global_batch):
        return f"{ran_out}: set trainer.micro_batch={smaller[0]}, which makes the same steps in smaller parts"
    return f"{ran_out}: use a smaller data.seq_len or a smaller model, as no micro-batch is smaller"


def _where(error: BaseException) -> str:
    return "the GPU" if isinstance(error, torch.OutOfMemoryError) or "CU" in str(error) else "the computer"


def _asked(error: BaseException) -> str:
    if (asked := ASKED.search(str(error))) is None:
        return ""
    number, unit = asked.groups()
    size = f"{float(number) / 2**20:,.1f} MiB" if unit == "bytes" else f"{number} {unit}"
    return f", when {size} more were asked for"


def _named(error: BaseException) -> str:
    return f" to open {error.filename}" if isinstance(error, OSError) and error.filename else ""
