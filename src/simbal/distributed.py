"""The processes that train one model together: ranks 0, 1, ..., of which the first alone writes and prints."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from simbal.errors import BusyError, UserError

T = TypeVar("T")
CPU = torch.device("cpu")


def world_size() -> int:
    """Return the number of processes that train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this process's number among those that train together; 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


def is_rank_zero() -> bool:
    """Whether this process writes the run's files; true without a process group."""
    return rank() == 0


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Return the sum of `tensor` over all ranks, the same on each, without a gradient."""
    total = tensor.detach().clone()
    if world_size() > 1:
        dist.all_reduce(total)
    return total


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, of which this rank may hold a shard; a collective, so every rank has to call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def max_over_ranks(number: int) -> int:
    """Return the largest `number` of all ranks, the same on each."""
    if world_size() == 1:
        return number
    found = torch.tensor(number)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def on_rank_zero(work: Callable[[], T]) -> T:
    """Run `work` on the first rank alone, and return its result on every rank.

    Raises:
        UserError: on every rank, if `work` raises one on the first; `BusyError` if it is that.
    """
    if world_size() == 1:
        return work()
    shared: list[Any] = [None]
    if is_rank_zero():
        try:
            shared[0] = work()
        except UserError as error:
            kind = BusyError if isinstance(error, BusyError) else UserError
            dist.broadcast_object_list([kind(str(error))], device=CPU)
            raise
    dist.broadcast_object_list(shared, device=CPU)
    if isinstance(shared[0], UserError):
        raise shared[0]
    return cast(T, shared[0])
