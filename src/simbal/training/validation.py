"""Sums over the validation set, and the metrics that follow from them.

Shapes: B sequences, S sequence length, N = B*S tokens, L MoE layers, E experts.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from simbal.distributed import sum_over_ranks
from simbal.metrics.routing import sequence_expert_use, topk_entropy
from simbal.metrics.table import VALIDATION
from simbal.model.router import Routing


@dataclass(frozen=True)
class Validation:
    """The metrics of one validation by key, None where a dense model has none, and their values by layer."""

    metrics: dict[str, float | None]
    layers: dict[str, list[Any]]


class ValidationTotals:
    """Sums over the validation set; float64 and int64, so that the metrics do not depend on the batch size."""

    def __init__(self) -> None:
        self.nats, self.tokens, self.num_bytes, self.sequences = 0.0, 0, 0, 0
        self.counts_LE, self.seu_L, self.entropy_L = torch.tensor(0), torch.tensor(0.0), torch.tensor(0.0)
        self.router_weights: list[Tensor] = []

    def add(self, nll_N: Tensor, target_bytes_N: Tensor, routings: list[Routing]) -> None:
        """Add one batch: nats and bytes of each target, and the routing of each layer."""
        self.nats += nll_N.double().sum().item()
        self.tokens += len(nll_N)
        self.num_bytes += int(target_bytes_N.sum())
        if not routings:
            return
        self.sequences += routings[0].num_sequences
        self.counts_LE = self.counts_LE + torch.stack([r.tokens_per_expert_E for r in routings]).cpu()
        self.seu_L = self.seu_L + torch.stack([_sequence_expert_use(r).sum() for r in routings]).cpu()
        self.entropy_L = self.entropy_L + torch.stack([_entropy_sum(r) for r in routings]).cpu()

    def over_ranks(self) -> "ValidationTotals":
        """Return the sums over all ranks, on every rank."""
        total = ValidationTotals()
        total.nats = sum_over_ranks(torch.tensor(self.nats, dtype=torch.float64)).item()
        counted = torch.tensor([self.tokens, self.num_bytes, self.sequences])
        total.tokens, total.num_bytes, total.sequences = sum_over_ranks(counted).tolist()
        total.counts_LE, total.seu_L = sum_over_ranks(self.counts_LE), sum_over_ranks(self.seu_L)
        total.entropy_L = sum_over_ranks(self.entropy_L)
        return total

    def summary(self, router_weights: list[Tensor]) -> Validation:
        """Return the metrics of all that was added, with the router weights (E, D) of each layer.

        Raises:
            ArithmeticError: the loss is NaN or infinite.
        """
        if not math.isfinite(self.nats):
            raise ArithmeticError(f"the validation loss is {self.nats}")
        self.router_weights = router_weights
        metrics: dict[str, float | None] = {}
        layers: dict[str, list[Any]] = {}
        for metric in VALIDATION:
            if metric.whole:
                metrics[metric.key] = metric.whole(self)
            if metric.by_layer and router_weights:
                layers[metric.key] = metric.by_layer(self).tolist()
            if metric.over_layers:
                metrics[metric.key] = metric.over_layers(layers[metric.key]) if router_weights else None
        return Validation(metrics, layers)


def _sequence_expert_use(routing: Routing) -> Tensor:
    return sequence_expert_use(routing.topk_experts_NK, routing.num_sequences, routing.probs_NE.shape[-1])


def _entropy_sum(routing: Routing) -> Tensor:
    return topk_entropy(routing.topk_probs_NK).double().sum()
