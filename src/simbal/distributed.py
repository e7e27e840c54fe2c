"""Collectives over the ranks that train one model together. Rank zero writes the files and prints."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from simbal.errors import BusyError, UserError

T = TypeVar("T")


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


def is_rank_zero() -> bool:
    """Return whether this process is rank zero, which writes the run's files; True without a process group."""
    return rank() == 0


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Return the sum of `tensor` over all ranks, without a gradient."""
    total = tensor.detach().clone()
    if world_size() > 1:
        dist.all_reduce(total)
    return total


def max_over_ranks(number: int) -> int:
    """Return the maximum of `number` over all ranks."""
    if world_size() == 1:
        return number
    maximum = torch.tensor(number)
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    return int(maximum)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor; return any other tensor unchanged. A collective: every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_full(target: Tensor, full: Tensor) -> None:
    """Copy `full`, the same values on every rank, to a tensor of the same shape that may be sharded."""
    if isinstance(target, DTensor):
        full = distribute_tensor(full.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(full)


def on_rank_zero(work: Callable[[], T]) -> T:
    """Run `work` on rank zero and return its result on every rank.

    Raises:
        UserError: on every rank, if `work` raises one on rank zero; a `BusyError` stays a `BusyError`.
    """
    if world_size() == 1:
        return work()
    shared: list[Any] = [None]
    if is_rank_zero():
        try:
            shared[0] = work()
        except UserError as error:
            kind = BusyError if isinstance(error, BusyError) else UserError
            dist.broadcast_object_list([kind(str(error))], device=torch.device("cpu"))
            raise
    dist.broadcast_object_list(shared, device=torch.device("cpu"))
    if isinstance(shared[0], UserError):
        raise shared[0]
    return cast(T, shared[0])
