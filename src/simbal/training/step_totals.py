"""What one optimizer step adds up to over its micro-batches.

Shapes: L MoE layers, E experts.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from simbal.model.router import Routing
from simbal.training.ranks import sum_over_ranks


class StepTotals:
    """Sums of this rank, from an empty start."""

    def __init__(self) -> None:
        self.micro_batches = 0
        self.counts_LE: Tensor | None = None  # tokens per expert; None before the first, or in a dense model
        self.measured: dict[str, Tensor] = {}  # (L, E) of each strategy

    def add(self, measured: Mapping[str, Tensor], routings: Sequence[Routing]) -> None:
        """One micro-batch."""
        self.micro_batches += 1
        for name, measured_LE in measured.items():
            self.measured[name] = self.measured[name] + measured_LE if name in self.measured else measured_LE
        if routings:
            counts_LE = torch.stack([routing.tokens_per_expert_E for routing in routings])
            self.counts_LE = counts_LE if self.counts_LE is None else self.counts_LE + counts_LE

    def over_ranks(self) -> dict[str, Tensor]:
        """What each strategy measured, summed over ranks."""
        return {name: sum_over_ranks(measured_LE) for name, measured_LE in self.measured.items()}
