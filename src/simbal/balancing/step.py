"""One optimizer step of the strategies: counts over micro-batches, losses that need the counts, and the update.

Shapes: L MoE layers, E experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor

from simbal.balancing.composition import Composition
from simbal.distributed import sum_over_ranks, world_size
from simbal.errors import UserError
from simbal.model.router import Routing


class StepInProgress:
    """An optimizer step of one rank.

    1. `counting_pass` over all micro-batches, if there are several and `strategies.needs_step_counts`.
    2. `add`, then `losses`, for every micro-batch.
    3. `finish` once after the optimizer's step.
    """

    def __init__(self, strategies: Composition, step_counts: Mapping[str, Tensor] | None = None) -> None:
        """Start a step; `step_counts` holds the measurements of the full step if a counting pass has already run."""
        self.strategies, self.step_counts = strategies, step_counts
        self.micro_batches = 0
        self.counts_LE: Tensor | None = None  # tokens per expert; None without micro-batches or layers
        self._measured: dict[str, Tensor] = {}  # (L, ...) by strategy
        self._summed: dict[str, Tensor] | None = None  # the same over ranks, until the next `add`

    @contextmanager
    def counting_pass(self) -> Iterator[Self]:
        """Yield an empty step without gradients: `add` every micro-batch to it. On exit, set `step_counts`."""
        counting = type(self)(self.strategies)
        with torch.no_grad():
            yield counting
        self.step_counts = counting.measured()

    def add(self, routings: Sequence[Routing]) -> None:
        """Count one micro-batch with one routing per layer."""
        self.micro_batches, self._summed = self.micro_batches + 1, None
        for name, measured_LE in self.strategies.measure(routings).items():
            self._measured[name] = self._measured[name] + measured_LE if name in self._measured else measured_LE
        if routings:
            counts_LE = torch.stack([routing.tokens_per_expert_E for routing in routings])
            self.counts_LE = counts_LE if self.counts_LE is None else self.counts_LE + counts_LE

    def measured(self) -> dict[str, Tensor]:
        """Return each strategy's measurement so far, (L, ...), summed over micro-batches and ranks."""
        if self._summed is None:
            self._summed = {name: sum_over_ranks(measured_LE) for name, measured_LE in self._measured.items()}
        return self._summed

    def losses(self, routings: Sequence[Routing], step: int) -> dict[str, Tensor]:
        """Return each strategy's loss term, a scalar, for the last added micro-batch in optimizer step `step`.

        Raises:
            UserError: a loss needs the counts of several micro-batches and there was no counting pass.
        """
        step_counts = self.step_counts
        if step_counts is None and self.strategies.needs_step_counts:
            if self.micro_batches > 1:
                raise UserError("scope=global with several micro-batches: run them all under counting_pass() first")
            step_counts = self.measured()  # the only micro-batch is the full step
        return self.strategies.losses(routings, step, step_counts)

    def finish(self, router_weights: Sequence[Tensor], lr: float, step: int) -> None:
        """Update the strategies after the optimizer's step.

        Args:
            router_weights: (E, D) per layer, after the optimizer's step.
            lr: learning rate.
            step: number of the step, from 0.
        """
        self.strategies.update(self.measured(), self.micro_batches * world_size(), router_weights, lr, step)
