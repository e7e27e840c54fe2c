"""Two data-parallel ranks, each with half of the batch, train like two micro-batches."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from simbal import conformance, distributed
from simbal.conformance import Case, batch_of, outcome, same, tiny_module, train
from simbal.distributed import sum_over_ranks
from tests.balancing.cases import CASES, EVERY_STRATEGY

RANKS = 2
TRIED = [*EVERY_STRATEGY, *(case for case in CASES if case.make().needs_step_counts)]


def trained(case: Case, micro_batches: int = 1) -> dict[str, Tensor]:
    """The outcome of two steps."""
    module = tiny_module(case)
    train(module, range(2), micro_batches)
    return outcome(module)


def trained_on_rank(case: Case) -> dict[str, Tensor]:
    """The outcome of two steps, with gradients averaged over ranks."""

    def average(parameter: Tensor) -> None:
        parameter.grad = sum_over_ranks(parameter.grad) / RANKS

    module = tiny_module(case)
    for parameter in module.model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)
    train(module, range(2))
    return outcome(module)


class Threads:
    """The part of torch.distributed that training needs, for ranks that are threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=60)
        self.rank = threading.local()
        self.inputs: list[Tensor] = [torch.empty(0)] * RANKS

    def run(self, work: Callable[[], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Return the result of `work()` on each rank."""

        def on(rank: int) -> dict[str, Tensor]:
            self.rank.number = rank
            try:
                return work()
            except BaseException:
                self.barrier.abort()
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
        self.inputs[self.rank.number] = tensor.clone()
        self.barrier.wait()
        tensor.copy_(torch.stack(self.inputs).sum(0))
        self.barrier.wait()  # all ranks have read the inputs


@pytest.mark.parametrize("case", TRIED, ids=str)
def test_ranks_matter_only_if_declared_and_then_like_micro_batches(case, monkeypatch):
    single, split, ranks = trained(case), trained(case, micro_batches=2), Threads()
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "dist", ranks)
        patch.setattr(conformance, "batch_of", lambda step: batch_of(step)[ranks.rank.number :: RANKS])
        first, second = ranks.run(lambda: trained_on_rank(case))
    assert same(first, second, exactly=True)
    assert same(first, single) != (case.make().properties.scope == "micro")
    assert same(first, split)
