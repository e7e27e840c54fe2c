"""The router: which experts each token goes to, with which weights, in fp32 under every precision.

Reference: arXiv 2506.14038, section 2; Shazeer et al. 2017 (arXiv 1701.06538).
Shapes: B sequences, S sequence length, N = B*S tokens, D model width, E experts, K experts per token, R = N*K slots.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize


@dataclass(frozen=True)
class Routing:
    """The decisions and measurements of one layer's router; at least fp32, but int64 for the choice and the counts."""

    logits_NE: Tensor
    probs_NE: Tensor  # after gating: softmax (rows sum to 1) or sigmoid (they do not)
    topk_experts_NK: Tensor
    topk_probs_NK: Tensor  # the weights applied to the experts' outputs
    tokens_per_expert_E: Tensor  # sums to N*K
    router_weight_ED: Tensor
    num_sequences: int  # N = num_sequences * S
    gating: str
    steered: bool  # the choice was not that of the K largest logits
    x_ND: Tensor | None = None  # the hidden states that were routed, without gradient; of a router that keeps them

    @classmethod
    def of_logits(
        cls,
        logits_NE: Tensor,
        top_k: int,
        router_weight_ED: Tensor,
        num_sequences: int = 1,
        gating: str = "softmax",
        renormalize: bool = True,
        choice_scores: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Self:
        """Return the routing by logits (N, E), of any model, in fp32 at least.

        Args:
            logits_NE: the router's.
            top_k: experts per token, K.
            router_weight_ED: the weight that has made the logits.
            num_sequences: B.
            gating: `softmax` or `sigmoid`.
            renormalize: divide the K weights by their sum.
            choice_scores: returns scores (N, E) from logits and probabilities, to choose by instead of the logits.
        """
        logits_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
        probs_NE = gate(logits_NE, gating)
        with torch.no_grad():
            scores_NE = choice_scores(logits_NE, probs_NE) if choice_scores else logits_NE
            experts_NK = largest(scores_NE, top_k)
            counts_E = count(experts_NK, logits_NE.shape[1])
        weights_NK = topk_weights(logits_NE, probs_NE, experts_NK, gating, renormalize)
        return cls(
            logits_NE, probs_NE, experts_NK, weights_NK, counts_E, router_weight_ED, num_sequences, gating,
            steered=scores_NE is not logits_NE,
        )  # fmt: skip

    @property
    def distribution_NE(self) -> Tensor:
        """The probabilities, normalised so that rows sum to 1 under either gating."""
        return self.probs_NE if self.gating == "softmax" else log_scores(self.logits_NE, self.gating).softmax(-1)

    @property
    def unsteered_experts_NK(self) -> Tensor:
        """The experts of the K largest logits, (N, K), whatever was chosen."""
        return largest(self.logits_NE, self.topk_experts_NK.shape[1]) if self.steered else self.topk_experts_NK


@dataclass(frozen=True)
class Candidates:
    """The tokens of a layer, with their logits and probabilities, when their experts are about to be chosen."""

    layer: int
    tokens_BS: Tensor  # ids; N = B*S
    logits_NE: Tensor
    probs_NE: Tensor


class Steering(Protocol):
    """A way to change a router's decisions from outside: the model does not know who balances it."""

    def adjust_logits(self, logits_NE: Tensor) -> Tensor:
        """Return the logits (N, E) that go into the gating."""

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return scores (N, E): each token goes to the K experts with the largest; they pick but never weigh."""


class Router(nn.Module):
    """The router of a layer: logits = x W^T; each token goes to the experts of the K largest.

    A `Steering` may say by which other scores to choose. softmax: p = softmax(logits); sigmoid: p = sigmoid(logits).
    With `renormalize` the K weights are divided by their sum. Both gatings are monotone, so the choice is that of the
    logits; ties go to the lowest expert index.
    """

    def __init__(self, d_model: int, num_experts: int, top_k: int, gating: str, renormalize: bool, layer: int) -> None:
        super().__init__()
        self.weight_ED = nn.Parameter(torch.empty(num_experts, d_model))
        self.top_k, self.gating, self.renormalize, self.layer = top_k, gating, renormalize, layer
        self.keeps_input = False  # hand x to who reads the routing

    def forward(self, x_ND: Tensor, tokens_BS: Tensor, steering: Steering | None = None) -> Routing:
        """Route the hidden states of B whole sequences; products in fp32, or in the input's dtype if that is wider."""
        # the weight once: a parametrised one is computed at each access
        routing = self.route(x_ND, self.weight_ED, tokens_BS, steering)
        return replace(routing, x_ND=x_ND.detach()) if self.keeps_input else routing

    def route(self, x_ND: Tensor, weight_ED: Tensor, tokens_BS: Tensor, steering: Steering | None) -> Routing:
        """Route as `forward` does, with this weight."""

        def choice_scores(logits_NE: Tensor, probs_NE: Tensor) -> Tensor:
            if steering is None:
                return logits_NE
            return steering.choice_scores(Candidates(self.layer, tokens_BS, logits_NE, probs_NE))

        wide = torch.promote_types(x_ND.dtype, torch.float32)
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_NE = F.linear(x_ND.to(wide), weight_ED.to(wide))
            if steering:
                logits_NE = steering.adjust_logits(logits_NE)
            return Routing.of_logits(
                logits_NE, self.top_k, weight_ED, len(tokens_BS), self.gating, self.renormalize, choice_scores
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply `fn`, but keep the dtype of a parametrised weight, as decompositions have no bf16 kernel."""
        super()._apply(device_only(fn) if parametrize.is_parametrized(self) else fn, recurse)  # type: ignore[no-untyped-call]
        return self


def gate(logits_NE: Tensor, gating: str) -> Tensor:
    """Return the softmax over the experts, or a sigmoid for each, (N, E)."""
    return logits_NE.softmax(-1) if gating == "softmax" else logits_NE.sigmoid()


def log_scores(logits_NE: Tensor, gating: str) -> Tensor:
    """Return log p up to a constant in each row, (N, E).

    Its softmax normalises scores that are too small to divide by their sum.
    """
    return logits_NE if gating == "softmax" else F.logsigmoid(logits_NE)


def largest(scores_NE: Tensor, top_k: int) -> Tensor:
    """Return the experts of the K largest scores, (N, K), by a stable sort: topk leaves the order of ties open."""
    return scores_NE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def topk_weights(logits_NE: Tensor, probs_NE: Tensor, experts_NK: Tensor, gating: str, renormalize: bool) -> Tensor:
    """Return the probabilities of the chosen experts, (N, K), with `renormalize` divided by their sum."""
    if not renormalize:
        return probs_NE.gather(-1, experts_NK)
    return log_scores(logits_NE.gather(-1, experts_NK), gating).softmax(-1)


def count(experts_NK: Tensor, num_experts: int) -> Tensor:
    """Return the number of tokens sent to each expert, (E,), int64; integer sums are the same in any order."""
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=experts_NK.device)
    slots_R = experts_NK.reshape(-1)
    return counts_E.scatter_add_(0, slots_R, torch.ones_like(slots_R))


def device_only(cast: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `cast` (as `nn.Module._apply` gets it) without its change of dtype: it only moves between devices."""
    return lambda tensor: tensor.to(cast(tensor.new_empty(0)).device)
