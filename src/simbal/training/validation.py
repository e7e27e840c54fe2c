"""Sums over the validation set, and the metrics that follow from them.

Shapes: B sequences, S sequence length, N = B*S tokens, L MoE layers, E experts.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from simbal.distributed import sum_over_ranks
from simbal.metrics import language, routing
from simbal.metrics.routing import sequence_expert_use, topk_entropy
from simbal.metrics.similarity import mean_squared_deviation
from simbal.model.router import Routing

DEFINITIONS = {
    "val/loss": "cross-entropy in nats, mean over the tokens of the validation set; no auxiliary loss, no z-loss",
    "val/ppl": "exp of val/loss",
    "val/bpb": "cross-entropy in bits, summed over tokens, by the UTF-8 bytes they stand for",
    "load/max_vio": "max / mean - 1 of the tokens per expert on the validation set, mean over layers",
    "load/tokens_per_expert": "tokens of the validation set that chose each expert, by layer; a token counts K times",
    "load/unique_experts": "experts chosen at least once on the validation set, summed over layers",
    "routing/seu": "distinct experts chosen in a sequence / E, mean over sequences and layers",
    "routing/entropy": "entropy in nats of a token's top-k weights divided by their sum, mean over tokens and layers",
    "router/gram_deviation": "mean over all E^2 entries of (R^T R - I)^2 with a bf16 product, mean over layers",
    "tokens_per_second": "training tokens by the seconds of training steps, validation excluded",
}
NO_METRICS = {"load/tokens_per_expert", "tokens_per_second"}  # one number for a whole validation


@dataclass(frozen=True)
class Validation:
    """The metrics of one validation, and the same for each layer.

    `metrics` are those of `DEFINITIONS`, None where a dense model has none. Numbers of single experts are in `layers`
    alone, as a list for each layer.
    """

    metrics: dict[str, float | None]
    layers: dict[str, list[Any]]


class ValidationTotals:
    """Sums in float64 and int64, so that the metrics do not depend on the batch size."""

    def __init__(self) -> None:
        self.nats, self.tokens, self.num_bytes, self.sequences = 0.0, 0, 0, 0
        self.counts_LE, self.seu_L, self.entropy_L = torch.tensor(0), torch.tensor(0.0), torch.tensor(0.0)

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
        """Return the metrics of all that was added.

        Raises:
            ArithmeticError: the loss is NaN or infinite.
        """
        loss = self.nats / self.tokens
        if not math.isfinite(loss):
            raise ArithmeticError(f"the validation loss is {loss}")
        metrics: dict[str, float | None] = {key: None for key in DEFINITIONS if key not in NO_METRICS}
        metrics["val/loss"] = loss
        metrics["val/ppl"] = language.perplexity(self.nats, self.tokens)
        metrics["val/bpb"] = language.bits_per_byte(self.nats, self.num_bytes)
        layers = self._layers(router_weights) if router_weights else {}
        metrics |= {key: sum(values) / len(values) for key, values in layers.items()}
        if layers:
            metrics["load/unique_experts"] = sum(layers["load/unique_experts"])
            layers["load/tokens_per_expert"] = self.counts_LE.tolist()
        return Validation(metrics, layers)

    def _layers(self, router_weights: list[Tensor]) -> dict[str, list[Any]]:
        tensors = {
            "load/max_vio": routing.max_vio(self.counts_LE),
            "load/unique_experts": routing.unique_experts(self.counts_LE),
            "routing/seu": self.seu_L / self.sequences,
            "routing/entropy": self.entropy_L / self.tokens,
            "router/gram_deviation": torch.stack([mean_squared_deviation(w) for w in router_weights]),
        }
        return {key: values.tolist() for key, values in tensors.items()}


def _sequence_expert_use(routing: Routing) -> Tensor:
    return sequence_expert_use(routing.topk_experts_NK, routing.num_sequences, routing.probs_NE.shape[-1])


def _entropy_sum(routing: Routing) -> Tensor:
    return topk_entropy(routing.topk_probs_NK).double().sum()
