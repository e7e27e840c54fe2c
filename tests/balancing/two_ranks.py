"""Trains every case on two ranks, each with half of the batch: python -m tests.balancing.two_ranks FILE."""

import os
import sys

import torch
import torch.distributed as dist
from torch import multiprocessing

from tests.balancing.cases import CASES, Case
from tests.balancing.tiny_training import outcome, tiny_module, train

STEPS = range(3)


def train_all(rank: int, store: str, file: str, cases: list[Case]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    outcomes = {}
    for case in cases:
        module = tiny_module(case)
        train(module, STEPS)
        outcomes[str(case)] = outcome(module)
    if rank == 0:
        torch.save(outcomes, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.spawn(train_all, (sys.argv[1] + ".store", sys.argv[1], CASES), nprocs=2)
