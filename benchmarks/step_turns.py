"""Run benchmark arms in separate processes that take turns: one arm runs steps while the others wait.

The first step of a turn is not reported because the caches then hold the data of another arm.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import cycle
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
from torch import Tensor

Arm = Callable[[Iterable[Tensor]], None]  # trains on all of its batches
STEPS = 4  # of a turn


class Seconds(NamedTuple):
    """CPU and wall time of one step, in seconds."""

    cpu: float
    wall: float


class Turns:
    """The batches of one arm, each yielded when it is the arm's turn. A step is the time between two batches.

    A Trainer can use this as its dataloader, so that a step includes the overhead of the Trainer.
    """

    def __init__(self, batches: Tensor, connection: Connection) -> None:
        self.batches, self.connection = batches, connection

    def __len__(self) -> int:  # without a length, Lightning prefetches a batch
        return 10**6

    def __iter__(self) -> Iterator[Tensor]:
        for batch in cycle(self.batches):
            try:
                self.connection.recv()
            except EOFError:
                return
            cpu, wall = time.process_time(), time.perf_counter()
            yield batch
            self.connection.send(Seconds(time.process_time() - cpu, time.perf_counter() - wall))


def take_turns(
    arms: Mapping[str, Arm], batches: Tensor, threads: int, rounds: int, warm_up: int
) -> dict[str, list[Seconds]]:
    """Run a turn of each arm per round; the first `warm_up` rounds are not reported."""
    spawn = multiprocessing.get_context("spawn")
    taken: dict[str, list[Seconds]] = {name: [] for name in arms}
    with ExitStack() as stack:
        connections: dict[str, Connection] = {}
        for name, arm in arms.items():
            connections[name], worker_end = spawn.Pipe()
            process = spawn.Process(target=_work, args=(arm, batches, threads, worker_end))
            process.start()
            worker_end.close()  # so that recv fails if the process dies
            stack.callback(process.join)
            stack.callback(connections[name].close)
        for _ in range(warm_up + rounds):
            for name, connection in connections.items():
                for _ in range(STEPS):
                    connection.send(None)
                    taken[name].append(connection.recv())
    return {
        name: [time for place, time in enumerate(times) if place >= warm_up * STEPS and place % STEPS]
        for name, times in taken.items()
    }


def _work(arm: Arm, batches: Tensor, threads: int, connection: Connection) -> None:
    torch.set_num_threads(threads)
    arm(Turns(batches, connection))
