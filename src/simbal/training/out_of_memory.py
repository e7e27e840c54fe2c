"""Turns the errors of torch and Python for a lack of memory into one sentence."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from simbal.errors import UserError

# how torch reports it on a CPU, and some CUDA libraries: as a plain RuntimeError
MESSAGE = re.compile(r"DefaultCPUAllocator|out of memory|STATUS_ALLOC_FAILED|std::bad_alloc")


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise `UserError` where memory runs out within the block."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not MESSAGE.search(str(error)):
            raise
        raise UserError("out of memory: use a smaller trainer.micro_batch, data.seq_len or model") from error
