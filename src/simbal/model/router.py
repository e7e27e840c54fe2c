"""The router: which experts each token goes to, with which weights, in fp32 under every precision.

Reference: arXiv 2506.14038, section 2; Shazeer et al. 2017 (arXiv 1701.06538); relu: arXiv 2412.14711.
A choice is ragged if a token may have any number of experts; K is then what is wanted on average, and the tables of
chosen experts and their weights are (N, E), with E in place of an expert, of weight 0, in slots that are empty.
Shapes: B sequences, S sequence length, N = B*S tokens, D model width, E experts, K experts per token (E in the tables
of a ragged choice), R = N*K slots, F width of an expert.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

SMALLEST = torch.finfo(torch.float32).tiny


class ExpertWeights(NamedTuple):
    """The weights of a layer's experts: gate and up together (E, 2, F, D), and down (E, F, D)."""

    w13_E2FD: Tensor
    w2_EFD: Tensor


@dataclass(frozen=True)
class Routing:
    """The decisions and measurements of one layer's router; at least fp32, but int64 for the choice and the counts."""

    logits_NE: Tensor
    probs_NE: Tensor  # after gating: softmax (rows sum to 1), sigmoid or relu (they do not)
    topk_experts_NK: Tensor  # E for none
    topk_probs_NK: Tensor  # the weights applied to the experts' outputs
    tokens_per_expert_E: Tensor  # sums to N*K, unless the choice is ragged
    router_weight_ED: Tensor
    num_sequences: int  # N = num_sequences * S
    gating: str
    steered: bool  # the choice was not that of the K largest logits
    top_k: int  # K
    ragged: bool = False
    x_ND: Tensor | None = None  # the hidden states that were routed, without gradient; of a router that keeps them
    experts: ExpertWeights | None = None  # of the layer, with gradient; None if it is not of our own models

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
        ragged: bool = False,
        drops: bool = False,
    ) -> Self:
        """Return the routing by logits (N, E), of any model, in fp32 at least.

        Args:
            logits_NE: the router's.
            top_k: experts per token, K.
            router_weight_ED: the weight that has made the logits.
            num_sequences: B.
            gating: `softmax`, `sigmoid` or `relu`.
            renormalize: divide the K weights by their sum.
            choice_scores: returns scores (N, E) from logits and probabilities, to choose by instead of the logits.
            ragged: choose all experts whose score is not -inf, instead of the K largest.
            drops: these are some of the experts of the K largest logits, and weigh what they would beside the others.
        """
        logits_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
        probs_NE = gate(logits_NE, gating)
        with torch.no_grad():
            scores_NE = choice_scores(logits_NE, probs_NE) if choice_scores else logits_NE
            experts_NK = admitted(scores_NE) if ragged else largest(scores_NE, top_k)
            counts_E = count(experts_NK, logits_NE.shape[1])
        weighed_NK = largest(logits_NE, top_k) if ragged and drops else experts_NK
        weights_NK = topk_weights(logits_NE, probs_NE, weighed_NK, gating, renormalize)
        if weighed_NK is not experts_NK:
            weights_NK = weights_left(experts_NK, weighed_NK, weights_NK, logits_NE.shape[1])
        return cls(
            logits_NE, probs_NE, experts_NK, weights_NK, counts_E, router_weight_ED, num_sequences, gating,
            scores_NE is not logits_NE, top_k, ragged,
        )  # fmt: skip

    @property
    def distribution_NE(self) -> Tensor:
        """The probabilities, normalised so that rows sum to 1 under every gating.

        With relu, a token without a logit above 0 has 1/E of each expert.
        """
        return self.probs_NE if self.gating == "softmax" else log_scores(self.logits_NE, self.gating).softmax(-1)

    @property
    def unsteered_experts_NK(self) -> Tensor:
        """The experts of the K largest logits, (N, K), whatever was chosen."""
        return largest(self.logits_NE, self.top_k) if self.steered else self.topk_experts_NK


@dataclass(frozen=True)
class Candidates:
    """The tokens of a layer, with their logits and probabilities, when their experts are about to be chosen."""

    layer: int
    tokens_BS: Tensor  # ids; N = B*S
    logits_NE: Tensor
    probs_NE: Tensor
    top_k: int  # K


class Steering(Protocol):
    """A way to change a router's decisions from outside: the model does not know who balances it.

    One that inherits from this changes nothing but what it overrides.
    """

    @property
    def ragged(self) -> bool:
        """Whether a token goes to all experts whose score is not -inf, instead of to K."""
        return False

    @property
    def drops(self) -> bool:
        """Whether a ragged choice leaves out some experts of the K largest logits, and the rest keep their weights."""
        return False

    def logits(self, x_ND: Tensor, weight_ED: Tensor, layer: int) -> Tensor:
        """Return the logits (N, E) of the hidden states; x W^T of a router alone."""
        return product(x_ND, weight_ED, layer)

    def adjust_logits(self, logits_NE: Tensor) -> Tensor:
        """Return the logits (N, E) that go into the gating."""
        return logits_NE

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return scores (N, E): each token goes to the K experts with the largest; they pick but never weigh.

        With `ragged` it goes to all whose score is not -inf, be it none or every one. They get no gradient.
        """
        return candidates.logits_NE


class SteeringAround(Steering):
    """A steering that changes nothing of another, `strategy`, but what it overrides."""

    strategy: Steering

    @property
    def ragged(self) -> bool:
        """That of the strategy."""
        return self.strategy.ragged

    @property
    def drops(self) -> bool:
        """That of the strategy."""
        return self.strategy.drops

    def logits(self, x_ND: Tensor, weight_ED: Tensor, layer: int) -> Tensor:
        """Return the logits (N, E) as the strategy maps to them."""
        return self.strategy.logits(x_ND, weight_ED, layer)

    def adjust_logits(self, logits_NE: Tensor) -> Tensor:
        """Return the logits (N, E) as the strategy adjusts them."""
        return self.strategy.adjust_logits(logits_NE)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the strategy's scores, (N, E)."""
        return self.strategy.choice_scores(candidates)


class Router(nn.Module):
    """The router of a layer: logits = x W^T; each token goes to the experts of the K largest.

    A `Steering` may say by which other scores to choose. softmax: p = softmax(logits); sigmoid: p = sigmoid(logits);
    relu: p = max(logits, 0). With `renormalize` the K weights are divided by their sum. The gatings are monotone, so
    the choice is that of the logits; ties go to the lowest expert index.
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
            return steering.choice_scores(Candidates(self.layer, tokens_BS, logits_NE, probs_NE, self.top_k))

        wide = torch.promote_types(x_ND.dtype, torch.float32)
        with torch.autocast(x_ND.device.type, enabled=False):
            map_to_logits = steering.logits if steering else product
            logits_NE = map_to_logits(x_ND.to(wide), weight_ED.to(wide), self.layer)
            if steering:
                logits_NE = steering.adjust_logits(logits_NE)
            return Routing.of_logits(
                logits_NE, self.top_k, weight_ED, len(tokens_BS), self.gating, self.renormalize, choice_scores,
                ragged=steering is not None and steering.ragged, drops=steering is not None and steering.drops,
            )  # fmt: skip

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply `fn`, but keep the dtype of a parametrised weight, as decompositions have no bf16 kernel."""
        super()._apply(device_only(fn) if parametrize.is_parametrized(self) else fn, recurse)  # type: ignore[no-untyped-call]
        return self


def product(x_ND: Tensor, weight_ED: Tensor, layer: int) -> Tensor:
    """Return x W^T, (N, E), in any layer."""
    return F.linear(x_ND, weight_ED)


def gate(logits_NE: Tensor, gating: str) -> Tensor:
    """Return the softmax over the experts, or a sigmoid or what is above 0 for each, (N, E)."""
    if gating == "softmax":
        return logits_NE.softmax(-1)
    return logits_NE.relu() if gating == "relu" else logits_NE.sigmoid()


def log_scores(logits_NE: Tensor, gating: str) -> Tensor:
    """Return log p up to a constant in each row, (N, E).

    Its softmax normalises scores that are too small to divide by their sum. Scores of 0, which relu gives, count as
    the smallest normal number: as nothing beside any other, and evenly where all are 0; they get no gradient.
    """
    if gating == "softmax":
        return logits_NE
    return logits_NE.clamp(min=SMALLEST).log() if gating == "relu" else F.logsigmoid(logits_NE)


def largest(scores_NE: Tensor, top_k: int) -> Tensor:
    """Return the experts of the K largest scores, (N, K), of equal ones the first: topk leaves the order of ties open.

    A CPU takes the largest K times, which is five to ten times as fast as a sort of many experts.
    """
    if scores_NE.device.type != "cpu" or 4 * top_k > scores_NE.shape[1]:
        return scores_NE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    left_NE = scores_NE.clamp(min=torch.finfo(scores_NE.dtype).min)  # -inf is left to those that are taken
    taken_NK = torch.empty((len(scores_NE), top_k), dtype=torch.int64)
    for place in range(top_k):
        taken_NK[:, place] = left_NE.argmax(-1)
        left_NE.scatter_(-1, taken_NK[:, place : place + 1], -math.inf)
    return taken_NK


def admitted(scores_NE: Tensor) -> Tensor:
    """Return the experts whose scores are not -inf, those of the largest first, (N, E); E in the slots behind them."""
    sorted_NE = scores_NE.sort(dim=-1, descending=True, stable=True)
    return sorted_NE.indices.masked_fill(sorted_NE.values == -math.inf, scores_NE.shape[1])


def topk_weights(logits_NE: Tensor, probs_NE: Tensor, experts_NK: Tensor, gating: str, renormalize: bool) -> Tensor:
    """Return the probabilities of the chosen experts, (N, K), with `renormalize` by their sum; 0 in empty slots."""
    empty_NK = experts_NK == logits_NE.shape[-1]
    any_NK = experts_NK.masked_fill(empty_NK, 0)
    if not renormalize:
        return probs_NE.gather(-1, any_NK).masked_fill(empty_NK, 0)
    scores_NK = log_scores(logits_NE.gather(-1, any_NK), gating)
    # not -inf: the gradient of a row without any expert would be NaN
    finite_NK = scores_NK.masked_fill(empty_NK, torch.finfo(scores_NK.dtype).min)
    return finite_NK.softmax(-1).masked_fill(empty_NK, 0)


def weights_left(left_NE: Tensor, experts_NK: Tensor, weights_NK: Tensor, num_experts: int) -> Tensor:
    """Return the weights of K experts, of which `left_NE` holds those that are left, (N, E); 0 in empty slots."""
    table = weights_NK.new_zeros(len(weights_NK), num_experts + 1)  # the last of empty slots
    return table.scatter(-1, experts_NK, weights_NK).gather(-1, left_NE)


def count(experts_NK: Tensor, num_experts: int) -> Tensor:
    """Return the number of tokens sent to each expert, (E,), int64; integer sums are the same in any order."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts_NK.device)  # the last of empty slots
    slots_R = experts_NK.reshape(-1)
    return counts.scatter_add_(0, slots_R, torch.ones_like(slots_R))[:num_experts]


def device_only(cast: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `cast` (as `nn.Module._apply` gets it) without its change of dtype: it only moves between devices."""
    return lambda tensor: tensor.to(cast(tensor.new_empty(0)).device)


@dataclass(frozen=True)
class Groups:
    """The limit of a token's choice to experts of its `chosen` best groups, as on few nodes; others are closed to it.

    A group is as good as its best expert (`score=best`, DeepSeek-V2, arXiv 2405.04434) or its two best together
    (`best two`, V3, arXiv 2412.19437). Shapes: G groups of e = E/G neighbours, k experts by which a group is judged.
    """

    count: int
    chosen: int
    score: Literal["best", "best two"]

    def limited(self, scores_NE: Tensor) -> Tensor:
        """Return the scores with -inf for the experts of all other groups: a score may be negative, so 0 is no limit.

        Ties go to the lowest group.
        """
        if self.chosen == self.count:
            return scores_NE
        scores_NGe = scores_NE.reshape(len(scores_NE), self.count, -1)
        best_NGk = scores_NGe.topk(1 if self.score == "best" else min(2, scores_NGe.shape[2]), dim=2).values
        chosen_NG = largest(best_NGk.sum(2), self.chosen)
        open_NG = torch.zeros_like(scores_NGe[:, :, 0], dtype=torch.bool).scatter(1, chosen_NG, True)
        return scores_NGe.masked_fill(~open_NG[:, :, None], -math.inf).flatten(1)
