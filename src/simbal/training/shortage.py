"""What a failed run was short of, and what to change."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from simbal.disk import DISK_REFUSES
from simbal.errors import UserError

DISK = {*DISK_REFUSES} - {errno.ENOENT}  # once a run has begun, a file that is missing is another matter
OPEN_FILES = (errno.EMFILE, errno.ENFILE)
# how libraries say it in a RuntimeError, without a number
MEMORY_SAID = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|CUDA (driver )?error: out of memory|CUDA out of memory"
    r"|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|std::bad_alloc|Cannot allocate memory"
)
ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ([kKMGT]i?B|bytes)")


@dataclass(frozen=True)
class Shortage:
    """`cause` is a word for programs, `sentence` says to a user what was short and what to change."""

    cause: Literal["memory", "disk", "open files"]
    sentence: str


def shortage(error: BaseException, folder: Path, micro_batch: int, global_batch: int) -> Shortage | None:
    """What `error`, or an error that it hides, was short of; None if it was nothing that can run short.

    Args:
        error: what ended the run.
        folder: that the run writes.
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
            # as refusals_of_disk says it, which may have said it already
            said = f"cannot write {folder}: {hidden.strerror}; free some space, or set output_dir"
            return Shortage("disk", str(error) if isinstance(error, UserError) else said)
    return None


@contextmanager
def room_for_a_model() -> Iterator[None]:
    """Want of memory for a model in the making becomes a `UserError`: no smaller micro-batch helps there."""
    try:
        yield
    except Exception as error:
        short = next((hidden for hidden in _chain(error) if _is_of_memory(hidden)), None)
        if short is None:
            raise
        says = f"{_where(short)} has no room for the model{_asked(short)}: use a smaller model"
        raise UserError(says) from None


def smaller_micro_batches(micro_batch: int, global_batch: int) -> list[int]:
    """The values of `trainer.micro_batch` below this one, the largest first; each divides the global batch."""
    return [size for size in range(micro_batch - 1, 0, -1) if global_batch % size == 0]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, and every one that it came from or that was being handled when it was raised."""
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
    asked = ASKED.search(str(error))
    return f", when {_readable(asked[1], asked[2])} more were asked for" if asked else ""


def _readable(number: str, unit: str) -> str:
    return f"{number} {unit}" if unit != "bytes" else f"{float(number) / 2**20:,.1f} MiB"


def _named(error: BaseException) -> str:
    return f" to open {error.filename}" if isinstance(error, OSError) and error.filename else ""
