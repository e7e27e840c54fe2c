"""Whether like tokens are routed alike: a random sample of token pairs, followed through every MoE layer.

For a pair of tokens with inputs x and x' of a layer, cos(x, x') is held against cos(x W^T, x' W^T) and against the
overlap of their top-K sets.

Reference: arXiv 2506.14038, section 3.1, whose router is meant to keep the similarity of its inputs.
Shapes: N tokens, C pairs, Q distinct tokens of the pairs, L MoE layers, D model width, E experts, K experts per token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from simbal.errors import UserError
from simbal.metrics.routing import choice_overlap
from simbal.model.init import generator
from simbal.model.moe import MoELayer
from simbal.model.router import Routing

CONSTANT = 1e-12  # cosines that differ by less differ by the rounding of fp64


@contextmanager
def inputs_of(layers: Sequence[MoELayer]) -> Iterator[list[Tensor]]:
    """A list that holds the last input (N, D) of each layer after every forward pass."""
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


class TokenPairs:
    """Pairs of different tokens, drawn before the first batch: they depend on the seed and the number of tokens alone.

    What is kept of a pair's token is fp32 x and its choice: 4 L D + 8 L K bytes.
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
        """One batch; batches come in order."""
        end = self._seen + len(inputs[0])
        here_q = self._tokens_Q[(self._tokens_Q >= self._seen) & (self._tokens_Q < end)] - self._seen
        here_q = here_q.to(inputs[0].device)
        x_LqD = torch.stack([x_ND[here_q].float().cpu() for x_ND in inputs])
        experts_LqK = torch.stack([routing.topk_experts_NK[here_q].cpu() for routing in routings])
        self._kept.append((x_LqD, experts_LqK))
        self._seen = end

    def compare(self, router_weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(L, C) each, fp64: cosines of the inputs, cosines of the logits x W^T, and overlaps of the choices."""
        x_LQD = torch.cat([x_LqD for x_LqD, _ in self._kept], 1)
        experts_LQK = torch.cat([experts_LqK for _, experts_LqK in self._kept], 1)
        first_C, second_C = self._which_2C
        inputs, logits, overlaps = [], [], []
        for x_QD, experts_QK, weight_ED in zip(x_LQD.double(), experts_LQK, router_weights, strict=True):
            logits_QE = x_QD @ weight_ED.detach().cpu().double().T
            inputs.append(F.cosine_similarity(x_QD[first_C], x_QD[second_C]))
            logits.append(F.cosine_similarity(logits_QE[first_C], logits_QE[second_C]))
            overlaps.append(choice_overlap(experts_QK[first_C], experts_QK[second_C]))
        return torch.stack(inputs), torch.stack(logits), torch.stack(overlaps)


def correlation(x_C: Tensor, y_C: Tensor) -> float | None:
    """Pearson's, in [-1, 1]; None if one of them is constant but for rounding."""
    x_C, y_C = x_C - x_C.mean(), y_C - y_C.mean()
    if min(x_C.abs().max(), y_C.abs().max()) < CONSTANT:
        return None
    return float((x_C @ y_C) / (x_C.square().sum() * y_C.square().sum()).sqrt())


def mean_in_bins(cosines_C: Tensor, values_C: Tensor, bins: int) -> tuple[list[int], list[float | None]]:
    """Pairs in each of `bins` equal parts of [-1, 1], and the mean of their values; None where there is no pair."""
    bin_C = ((cosines_C + 1) / 2 * bins).long().clamp(0, bins - 1)
    counts = torch.bincount(bin_C, minlength=bins).tolist()
    sums = torch.bincount(bin_C, values_C.double(), minlength=bins).tolist()
    return counts, [total / count if count else None for total, count in zip(sums, counts, strict=True)]
