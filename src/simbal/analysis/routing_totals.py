"""Sums over the validation windows of how every layer routes, and the numbers they become.

Sums are int64 and float64, so that the number of sequences in a batch does not decide a digit that is printed.

Shapes: N tokens, L MoE layers, E experts, K experts per token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from simbal.metrics import load
from simbal.metrics.routing import choice_overlap, full_entropy, mutual_information, sequence_expert_use, topk_entropy
from simbal.model.router import Routing, log_scores

PIECES = (128, 512)  # tokens; SEU grows with the length, so it is compared at lengths that many runs have
SUMMED = ("unique_experts", "dead_experts", "near_dead_experts")  # over layers; of all else the mean


class RoutingTotals:
    """`layers` gives each number for each layer once all batches have been added."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len, self.tokens, self.sequences = seq_len, 0, 0
        self.lengths = {f"seu_{length}": length for length in PIECES if length <= seq_len} | {"seu": seq_len}
        self._counts_LE, self._probs_LE = torch.tensor(0), torch.tensor(0.0)
        self._sums_L: dict[str, Tensor] = {}

    def add(self, routings: Sequence[Routing], others: Sequence[Routing] | None = None) -> None:
        """One batch: the routing of each layer, and that of another run on the same tokens."""
        self.sequences += routings[0].num_sequences
        self.tokens += len(routings[0].logits_NE)
        self._counts_LE = self._counts_LE + torch.stack([r.tokens_per_expert_E for r in routings]).cpu()
        probs_LE = torch.stack([routing.distribution_NE.double().sum(0) for routing in routings])
        self._probs_LE = self._probs_LE + probs_LE.cpu()
        for length_name, length in self.lengths.items():
            self._add(length_name, [_use_of_pieces(routing, self.seq_len, length) for routing in routings])
        self._add("entropy_topk", [topk_entropy(_weights_NK(routing)).sum() for routing in routings])
        self._add("entropy_full", [full_entropy(routing.distribution_NE.double()).sum() for routing in routings])
        if others is not None:
            pairs = zip(routings, others, strict=True)
            overlaps = [choice_overlap(ours.topk_experts_NK, theirs.topk_experts_NK).sum() for ours, theirs in pairs]
            self._add("saturation", overlaps)

    def layers(self) -> dict[str, list[float]]:
        """Each number of each layer."""
        counts_LE, entropy_L = self._counts_LE, self._sums_L["entropy_full"] / self.tokens
        tensors = {
            name: self._sums_L[name] / (self.sequences * (self.seq_len // length))
            for name, length in self.lengths.items()
        }
        tensors |= {
            "unique_experts": load.unique_experts(counts_LE),
            "dead_experts": load.dead_experts(counts_LE),
            "near_dead_experts": load.near_dead_experts(counts_LE),
            "max_vio": load.max_vio(counts_LE),
            "gini": load.gini(counts_LE),
            "squared_variation": load.squared_variation(counts_LE),
            "entropy_topk": self._sums_L["entropy_topk"] / self.tokens,
            "entropy_full": entropy_L,
            "entropy_load": load.load_entropy(counts_LE),
            "effective_share": load.load_entropy(counts_LE).exp() / counts_LE.shape[-1],
            "mutual_information": mutual_information(self._probs_LE / self.tokens, entropy_L),
        }
        if "saturation" in self._sums_L:
            tensors["saturation"] = self._sums_L["saturation"] / self.tokens
        return {name: values_L.tolist() for name, values_L in tensors.items()}

    def tokens_per_expert(self) -> list[list[int]]:
        """Counts (L, E) from which the load's numbers come."""
        return self._counts_LE.tolist()

    def _add(self, name: str, values: list[Tensor]) -> None:
        values_L = torch.stack(values).double().cpu()
        self._sums_L[name] = self._sums_L[name] + values_L if name in self._sums_L else values_L


def over_layers(layers: dict[str, list[float]]) -> dict[str, float]:
    """The sum of what is counted in experts, the mean of all else; and the least of the experts used."""
    over = {name: sum(values) / (1 if name in SUMMED else len(values)) for name, values in layers.items()}
    return over | {"unique_experts_min": float(min(layers["unique_experts"]))}


def _weights_NK(routing: Routing) -> Tensor:
    """The chosen weights divided by their sum; from the logits, as a sum of scores can be 0."""
    return log_scores(routing.logits_NE.gather(-1, routing.topk_experts_NK), routing.gating).double().softmax(-1)


def _use_of_pieces(routing: Routing, seq_len: int, length: int) -> Tensor:
    """SEU summed over the whole pieces of `length` tokens; what is left at a sequence's end is left out."""
    pieces, num_experts = seq_len // length, routing.logits_NE.shape[-1]
    experts_BSK = routing.topk_experts_NK.view(routing.num_sequences, seq_len, -1)
    experts_BRK = experts_BSK[:, : pieces * length]
    return sequence_expert_use(experts_BRK, routing.num_sequences * pieces, num_experts).sum()
