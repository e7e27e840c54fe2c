"""The validation schedule, the sums over validation windows, and the metrics computed from them.

Shapes: B sequences, S sequence length, N = B*S tokens, L MoE layers, E experts, D model width, G documents.
"""

import math
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from simbal.distributed import max_over_ranks, sum_over_ranks
from simbal.metrics.definitions import VALIDATION, perplexity
from simbal.metrics.routing import sequence_expert_use, topk_entropy
from simbal.model.router import Routing


def next_validation(step: int, every: int, at: str) -> int:
    """Return the first step after `step` that is followed by a validation.

    Validations follow multiples of `every` and, with `at="log"`, powers of two below `every`.
    """
    power = 1 << step.bit_length()
    return power if at == "log" and power < every else (step // every + 1) * every


def is_validated(step: int, every: int, at: str) -> bool:
    """Whether a validation follows `step`; step 0 is the start of training and always has one."""
    return step == 0 or next_validation(step - 1, every, at) == step


class ValidationSchedule(Callback):
    """Makes Lightning validate after the steps given by `next_validation`."""

    def __init__(self, every: int, at: str) -> None:
        self.every, self.at = every, at

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Set the number of micro-batches, counted from the start of training, after which Lightning validates."""
        step = next_validation(trainer.global_step, self.every, self.at)
        trainer.val_check_batch = step * trainer.accumulate_grad_batches


@dataclass(frozen=True)
class Validation:
    """The result of one validation."""

    metrics: dict[str, float | None]  # None if a dense model has no value
    layers: dict[str, list[Any]]  # values of each MoE layer
    documents_G3: Tensor  # nats, tokens and bytes of each document up to the last one seen; fp64


class ValidationTotals:
    """Sums over validation windows, in float64 and int64, so that the metrics do not depend on the batch size."""

    def __init__(self) -> None:
        self.nats, self.tokens, self.num_bytes, self.sequences = 0.0, 0, 0, 0
        self.counts_LE, self.seu_L, self.entropy_L = torch.tensor(0), torch.tensor(0.0), torch.tensor(0.0)
        self.documents_G3 = torch.zeros(0, 3, dtype=torch.float64)
        self.router_weights: list[Tensor] = []

    def add(self, nll_N: Tensor, target_bytes_N: Tensor, documents_N: Tensor, routings: list[Routing]) -> None:
        """Add one batch: the nats, bytes and document of each target, and the routing of each layer."""
        self.nats += nll_N.double().sum().item()
        self.tokens += len(nll_N)
        self.num_bytes += int(target_bytes_N.sum())
        self._pad_documents(int(documents_N.max()) + 1)
        values_N3 = torch.stack([nll_N, torch.ones_like(nll_N), target_bytes_N], 1).double().cpu()
        self.documents_G3.index_add_(0, documents_N.cpu(), values_N3)
        if not routings:
            return
        self.sequences += routings[0].num_sequences
        uses = [sequence_expert_use(r.topk_experts_NK, r.num_sequences, r.probs_NE.shape[-1]) for r in routings]
        entropies = [topk_entropy(r.topk_probs_NK).double() for r in routings]
        self.counts_LE = self.counts_LE + torch.stack([r.tokens_per_expert_E for r in routings]).cpu()
        self.seu_L = self.seu_L + torch.stack([use.sum() for use in uses]).cpu()
        self.entropy_L = self.entropy_L + torch.stack([entropy.sum() for entropy in entropies]).cpu()

    def _pad_documents(self, documents: int) -> None:
        self.documents_G3 = F.pad(self.documents_G3, (0, 0, 0, max(0, documents - len(self.documents_G3))))

    def over_ranks(self) -> "ValidationTotals":
        """Return the sums over all ranks; a collective."""
        total = ValidationTotals()
        total.nats = sum_over_ranks(torch.tensor(self.nats, dtype=torch.float64)).item()
        counts = torch.tensor([self.tokens, self.num_bytes, self.sequences])
        total.tokens, total.num_bytes, total.sequences = sum_over_ranks(counts).tolist()
        total.counts_LE, total.seu_L = sum_over_ranks(self.counts_LE), sum_over_ranks(self.seu_L)
        total.entropy_L = sum_over_ranks(self.entropy_L)
        self._pad_documents(max_over_ranks(len(self.documents_G3)))
        total.documents_G3 = sum_over_ranks(self.documents_G3)
        return total

    def summary(self, router_weights: list[Tensor]) -> Validation:
        """Return the metrics of all added batches, given the router weight (E, D) of each layer.

        Raises:
            ArithmeticError: a metric is NaN or infinite; the message names it.
        """
        if not math.isfinite(perplexity(self.nats, self.tokens)):
            raise ArithmeticError("the perplexity")
        self.router_weights = router_weights
        metrics: dict[str, float | None] = {}
        layers: dict[str, list[Any]] = {}
        for metric in VALIDATION:
            if metric.from_sums:
                metrics[metric.key] = metric.from_sums(self)
            if metric.by_layer and router_weights:
                layers[metric.key] = metric.by_layer(self).tolist()
            if metric.over_layers:
                metrics[metric.key] = metric.over_layers(layers[metric.key]) if router_weights else None
            if not math.isfinite(metrics.get(metric.key) or 0):
                raise ArithmeticError(f"the {metric.title}")
        return Validation(metrics, layers, self.documents_G3)
