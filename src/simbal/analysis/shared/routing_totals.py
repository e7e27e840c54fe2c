"""Sums over the validation windows of how every layer routes, a sample of pairs of tokens, and the numbers of both.

Sums are int64 and float64, so that the number of sequences in a batch does not decide a digit that is printed.

Shapes: B sequences, S sequence length, N tokens, R tokens of whole pieces, C pairs, Q tokens in pairs, q of them in a
batch, L MoE layers, E experts, K experts per token, D model width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from simbal.errors import UserError
from simbal.metrics import routing
from simbal.metrics.routing import choice_overlap, full_entropy, mutual_information, sequence_expert_use, topk_entropy
from simbal.model.init import generator
from simbal.model.moe import MoELayer
from simbal.model.router import Routing

PIECES = (128, 512)  # tokens; SEU grows with the length, so it is compared at lengths that many runs have
SUMMED = ("unique_experts", "dead_experts", "near_dead_experts")  # over layers; of all else the mean
CONSTANT = 1e-12  # cosines that differ by less differ by the rounding of fp64


class RoutingTotals:
    """Sums of the routing of each layer; once all batches have been added, `layers` gives the numbers."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len, self.tokens, self.sequences = seq_len, 0, 0
        self.lengths = {f"seu_{length}": length for length in PIECES if length <= seq_len} | {"seu": seq_len}
        self._counts_LE, self._probs_LE = torch.tensor(0), torch.tensor(0.0)
        self._sums_L: dict[str, Tensor] = {}

    def add(self, routings: Sequence[Routing], others: Sequence[Routing] | None = None) -> None:
        """Add one batch: the routing of each layer, and that of another run on the same tokens."""
        self.sequences += routings[0].num_sequences
        self.tokens += len(routings[0].logits_NE)
        self._counts_LE = self._counts_LE + torch.stack([r.tokens_per_expert_E for r in routings]).cpu()
        probs_LE = torch.stack([routing.distribution_NE.double().sum(0) for routing in routings])
        self._probs_LE = self._probs_LE + probs_LE.cpu()
        for length_name, length in self.lengths.items():
            self._add(length_name, [_use_of_pieces(routing, self.seq_len, length) for routing in routings])
        self._add("entropy", [topk_entropy(routing.topk_probs_NK.double()).sum() for routing in routings])
        self._add("entropy_full", [full_entropy(routing.distribution_NE.double()).sum() for routing in routings])
        if others is not None:
            pairs = zip(routings, others, strict=True)
            overlaps = [_overlap(ours, theirs.topk_experts_NK).sum() for ours, theirs in pairs]
            self._add("saturation", overlaps)

    def layers(self) -> dict[str, list[float]]:
        """Return each number of each layer, as lists of length L by name."""
        counts_LE, entropy_L = self._counts_LE, self._sums_L["entropy_full"] / self.tokens
        tensors = {
            name: self._sums_L[name] / (self.sequences * (self.seq_len // length))
            for name, length in self.lengths.items()
        }
        tensors |= {
            "unique_experts": routing.unique_experts(counts_LE),
            "dead_experts": routing.dead_experts(counts_LE),
            "near_dead_experts": routing.near_dead_experts(counts_LE),
            "max_vio": routing.max_vio(counts_LE),
            "gini": routing.gini(counts_LE),
            "squared_variation": routing.squared_variation(counts_LE),
            "entropy": self._sums_L["entropy"] / self.tokens,
            "entropy_full": entropy_L,
            "entropy_load": routing.load_entropy(counts_LE),
            "effective_share": routing.load_entropy(counts_LE).exp() / counts_LE.shape[-1],
            "mutual_information": mutual_information(self._probs_LE / self.tokens, entropy_L),
        }
        if "saturation" in self._sums_L:
            tensors["saturation"] = self._sums_L["saturation"] / self.tokens
        return {name: values_L.tolist() for name, values_L in tensors.items()}

    def tokens_per_expert(self) -> list[list[int]]:
        """Return the counts (L, E) from which the load's numbers come."""
        return self._counts_LE.tolist()

    def _add(self, name: str, values: list[Tensor]) -> None:
        values_L = torch.stack(values).double().cpu()
        self._sums_L[name] = self._sums_L[name] + values_L if name in self._sums_L else values_L


class TokenPairs:
    """A sample of pairs of different tokens, drawn before the first batch.

    It depends on the seed and the number of tokens alone. For a pair's token fp32 x and its choice are kept: 4 L D + 8
    L K bytes.
    """

    def __init__(self, num_tokens: int, pairs: int, seed: int) -> None:
        if num_tokens < 2:
            raise UserError(f"pairs of tokens need 2 tokens, but the validation windows hold {num_tokens}")
        draws = generator(seed, "routing/pairs")
        first_C = torch.randint(num_tokens, (pairs,), generator=draws)
        step_C = torch.randint(1, num_tokens, (pairs,), generator=draws)
        both_2C = torch.stack([first_C, (first_C + step_C) % num_tokens])
        self._tokens_Q, self._which_2C = torch.unique(both_2C, return_inverse=True)
        self._seen = 0
        self._kept: list[tuple[Tensor, Tensor]] = []  # of each batch, x (L, q, D) and choice (L, q, K)

    def add(self, inputs: Sequence[Tensor], routings: Sequence[Routing]) -> None:
        """Add one batch; batches come in order."""
        end = self._seen + len(inputs[0])
        here_q = self._tokens_Q[(self._tokens_Q >= self._seen) & (self._tokens_Q < end)] - self._seen
        here_q = here_q.to(inputs[0].device)
        x_LqD = torch.stack([x_ND[here_q].float().cpu() for x_ND in inputs])
        experts_LqK = torch.stack([routing.topk_experts_NK[here_q].cpu() for routing in routings])
        self._kept.append((x_LqD, experts_LqK))
        self._seen = end

    def compare(self, router_weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return cosines of the inputs, cosines of the logits x W^T, and overlaps of the choices, (L, C) each, fp64."""
        x_LQD = torch.cat([x_LqD for x_LqD, _ in self._kept], 1)
        experts_LQK = torch.cat([experts_LqK for _, experts_LqK in self._kept], 1)
        first_C, second_C = self._which_2C
        inputs, logits, overlaps = [], [], []
        for x_QD, experts_QK, weight_ED in zip(x_LQD.double(), experts_LQK, router_weights, strict=True):
            logits_QE = x_QD @ weight_ED.detach().cpu().double().T
            inputs.append(F.cosine_similarity(x_QD[first_C], x_QD[second_C]))
            logits.append(F.cosine_similarity(logits_QE[first_C], logits_QE[second_C]))
            overlaps.append(choice_overlap(experts_QK[first_C], experts_QK[second_C], len(weight_ED)))
        return torch.stack(inputs), torch.stack(logits), torch.stack(overlaps)


def over_layers(layers: dict[str, list[float]]) -> dict[str, float]:
    """Return the sum of numbers of experts, the mean of all others, and the least number of experts used."""
    over = {name: sum(values) / (1 if name in SUMMED else len(values)) for name, values in layers.items()}
    return over | {"unique_experts_min": float(min(layers["unique_experts"]))}


@contextmanager
def inputs_of(layers: Sequence[MoELayer]) -> Iterator[list[Tensor]]:
    """Yield a list that holds the last input (N, D) of each layer after every forward pass."""
    inputs = [torch.empty(0)] * len(layers)

    def keep(index: int) -> Any:
        def hook(_: MoELayer, args: tuple[Tensor, ...]) -> None:
            inputs[index] = args[0].flatten(0, 1)

        return hook

    handles = [layer.register_forward_pre_hook(keep(index)) for index, layer in enumerate(layers)]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def correlation(x_C: Tensor, y_C: Tensor) -> float | None:
    """Return Pearson's correlation, in [-1, 1]; None if one of the two is constant but for rounding."""
    x_C, y_C = x_C - x_C.mean(), y_C - y_C.mean()
    if min(x_C.abs().max(), y_C.abs().max()) < CONSTANT:
        return None
    return float((x_C @ y_C) / (x_C.square().sum() * y_C.square().sum()).sqrt())


def mean_in_bins(cosines_C: Tensor, values_C: Tensor, bins: int) -> tuple[list[int], list[float | None]]:
    """Return the number of pairs in each of `bins` equal parts of [-1, 1], and the mean of their values.

    The mean is None where there is no pair.
    """
    bin_C = ((cosines_C + 1) / 2 * bins).long().clamp(0, bins - 1)
    counts = torch.bincount(bin_C, minlength=bins).tolist()
    sums = torch.bincount(bin_C, values_C.double(), minlength=bins).tolist()
    return counts, [total / count if count else None for total, count in zip(sums, counts, strict=True)]


def _overlap(routing: Routing, others_NK: Tensor) -> Tensor:
    return choice_overlap(routing.topk_experts_NK, others_NK, routing.logits_NE.shape[1])


def _use_of_pieces(routing: Routing, seq_len: int, length: int) -> Tensor:
    """Return SEU summed over the whole pieces of `length` tokens; the rest of a sequence is left out."""
    pieces, num_experts = seq_len // length, routing.logits_NE.shape[-1]
    experts_BSK = routing.topk_experts_NK.view(routing.num_sequences, seq_len, -1)
    experts_BRK = experts_BSK[:, : pieces * length]
    return sequence_expert_use(experts_BRK, routing.num_sequences * pieces, num_experts).sum()
