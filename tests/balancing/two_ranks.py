"""Trains on two ranks, each with half of the batch: threads of a test, or processes.

python -m tests.balancing.two_ranks FILE: a case of each scope on two processes; the outcomes of the first in FILE.
"""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from simbal.conformance import Case, outcome, tiny_module, train
from tests.balancing.cases import CASES
from tests.child_processes import DEADLINE_SECONDS

RANKS = 2
OF_EACH_SCOPE = [*{case.make().properties.scope: case for case in CASES}.values()]


def trained(case: Case, **cut: int) -> dict[str, Tensor]:
    """The outcome of two steps, `cut` by `rank` or `micro_batches`."""
    module = tiny_module(case)
    train(module, range(2), **cut)
    return outcome(module)


class Threads:
    """As much of torch.distributed as training here asks for, among ranks that are threads of this process."""

    def __init__(self) -> None:
        self.meeting = threading.Barrier(RANKS, timeout=DEADLINE_SECONDS)
        self.rank = threading.local()
        self.given: list[Tensor] = [torch.empty(0)] * RANKS

    def run(self, work: Callable[[int], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """What `work(rank)` returns on each rank."""

        def on(rank: int) -> dict[str, Tensor]:
            self.rank.number = rank
            try:
                return work(rank)
            except BaseException:
                self.meeting.abort()
                raise

        with ThreadPoolExecutor(RANKS) as pool:
            return [*pool.map(on, range(RANKS))]

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return RANKS

    def all_reduce(self, tensor: Tensor) -> None:
        self.given[self.rank.number] = tensor.clone()
        self.meeting.wait()
        tensor.copy_(torch.stack(self.given).sum(0))
        self.meeting.wait()  # everybody has read what is given


def train_all(rank: int, store: str, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    outcomes = {str(case): trained(case, rank=rank) for case in OF_EACH_SCOPE}
    if rank == 0:
        torch.save(outcomes, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.spawn(train_all, (sys.argv[1] + ".store", sys.argv[1]), nprocs=RANKS)
