"""The findings of training that are handed over as it goes: of each finished optimizer step, and of each validation.

Shapes: L MoE layers, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from simbal.distributed import sum_over_ranks, world_size
from simbal.training.validation import Validation


@dataclass(frozen=True)
class StepResult:
    """The findings of one rank in one optimizer step; tensors stay on the device until somebody reads them."""

    number: int  # the steps done, this one included
    losses: Sequence[Mapping[str, Tensor]]  # of each micro-batch: the scalars `loss`, `ce` and `aux/STRATEGY`
    grad_norm: Tensor  # of the whole gradient, before clipping
    counts_LE: Tensor | None  # tokens per expert; None in a dense model, and where the step was skipped
    skipped_steps: int | None  # of the run so far, as their loss or gradient was not finite; None: none may be

    def mean_losses(self) -> dict[str, float]:
        """Return each loss by name, mean over micro-batches and ranks; a collective, and the device is waited for."""
        names = [*self.losses[0]]
        sums = torch.tensor([sum(loss[name].item() for loss in self.losses) for name in names], dtype=torch.float64)
        means = sum_over_ranks(sums) / world_size() / len(self.losses)
        return dict(zip(names, means.tolist(), strict=True))


class Observer(Protocol):
    """A receiver of what training finds; it changes nothing that the training depends on."""

    def observe_step(self, step: StepResult) -> None:
        """Receive a finished optimizer step, before Lightning calls `on_train_batch_end`."""

    def observe_validation(self, validation: Validation) -> None:
        """Receive the metrics of a validation, before Lightning calls `on_validation_end`."""
