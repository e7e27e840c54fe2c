"""The router: chooses the experts of each token and their weights, in fp32 under every precision.

A choice is ragged if the number of experts per token varies. K is then the desired average, and the tables of chosen
experts and their weights are (N, E); empty slots hold the index E and the weight 0.
Reference: arXiv 2506.14038, section 2; Shazeer et al. 2017 (arXiv 1701.06538); relu: arXiv 2412.14711; sqrtsoftplus:
DeepSeek-V4, as implemented in transformers 5.23 and Megatron-LM.
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
    """The weights of a layer's experts: gate and up, (E, 2, F, D), and down, (E, F, D)."""

    w13_E2FD: Tensor
    w2_EFD: Tensor


@dataclass(frozen=True)
class Routing:
    """Decisions and measurements of one layer's router; choices and counts are int64, the rest at least fp32."""

    logits_NE: Tensor
    probs_NE: Tensor  # logits after the gating; rows sum to 1 under softmax only
    topk_experts_NK: Tensor  # int64; empty slots hold E
    topk_probs_NK: Tensor  # weights of the experts' outputs
    tokens_per_expert_E: Tensor  # sums to N*K unless the choice is ragged
    router_weight_ED: Tensor
    num_sequences: int  # N = num_sequences * S
    gating: str
    steered: bool  # the choice is not simply the K largest logits
    top_k: int  # K
    ragged: bool = False
    x_ND: Tensor | None = None  # the router's input without gradient, if `Router.keeps_input`
    experts: ExpertWeights | None = None  # weights of the layer's experts, with gradient; None outside simbal's model
    lengths_B: Tensor | None = None  # tokens of each sequence, if they differ; `num_sequences` is then 1

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
        scale: float = 1.0,
    ) -> Self:
        """Return the routing for the logits of any model, in at least fp32.

        Args:
            logits_NE: the router's logits.
            top_k: experts per token, K.
            router_weight_ED: the router's weight.
            num_sequences: B.
            gating: `softmax`, `sigmoid`, `sqrtsoftplus` or `relu`.
            renormalize: divide the K weights by their sum.
            choice_scores: function from logits and probabilities to the scores, (N, E), to choose by; None: logits.
            ragged: choose all experts with a score above -inf instead of the K largest scores.
            drops: the chosen experts are a subset of the K largest logits, and their weights are computed among
                all K.
            scale: multiplier of the weights.
        """
        logits_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
        probs_NE = apply_gating(logits_NE, gating)
        with torch.no_grad():
            scores_NE = choice_scores(logits_NE, probs_NE) if choice_scores else logits_NE
            experts_NK = ragged_indices(scores_NE) if ragged else topk_indices(scores_NE, top_k)
            counts_E = count_tokens(experts_NK, logits_NE.shape[1])
        weighted_NK = topk_indices(logits_NE, top_k) if ragged and drops else experts_NK
        weights_NK = topk_weights(logits_NE, probs_NE, weighted_NK, gating, renormalize)
        if weighted_NK is not experts_NK:
            weights_NK = kept_weights(experts_NK, weighted_NK, weights_NK, logits_NE.shape[1])
        if scale != 1:
            weights_NK = scale * weights_NK
        return cls(
            logits_NE, probs_NE, experts_NK, weights_NK, counts_E, router_weight_ED, num_sequences, gating,
            scores_NE is not logits_NE, top_k, ragged,
        )  # fmt: skip

    @property
    def distribution_NE(self) -> Tensor:
        """The probabilities, normalized so that rows sum to 1 under every gating.

        With relu, a token without a positive logit gets 1/E for each expert.
        """
        return self.probs_NE if self.gating == "softmax" else log_scores(self.logits_NE, self.gating).softmax(-1)

    @property
    def unsteered_experts_NK(self) -> Tensor:
        """The experts with the K largest logits, (N, K), regardless of the actual choice."""
        return topk_indices(self.logits_NE, self.top_k) if self.steered else self.topk_experts_NK


@dataclass(frozen=True)
class Candidates:
    """The inputs to a layer's choice of experts: token ids, logits and probabilities."""

    layer: int
    tokens_BS: Tensor  # token ids
    logits_NE: Tensor
    probs_NE: Tensor
    top_k: int  # K


class Steering(Protocol):
    """The interface through which a balancing strategy changes a router's decisions.

    The model depends only on this interface. The default methods change nothing. `logits` and `choice_scores` are told
    their layer; the other members are those of `at(layer)`.
    """

    def at(self, layer: int) -> "Steering":
        """Return the steering with the `ragged`, `drops` and `adjust_logits` of one layer."""
        return self

    @property
    def ragged(self) -> bool:
        """Whether a token goes to all experts with a score above -inf instead of to K experts."""
        return False

    @property
    def drops(self) -> bool:
        """Whether some of the K chosen experts are dropped while the others keep their weights."""
        return False

    def logits(self, x_ND: Tensor, weight_ED: Tensor, layer: int) -> Tensor:
        """Return the logits, (N, E), of the hidden states; by default x W^T."""
        return linear_logits(x_ND, weight_ED, layer)

    def adjust_logits(self, logits_NE: Tensor) -> Tensor:
        """Return the logits, (N, E), that enter the gating."""
        return logits_NE

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return scores, (N, E): each token goes to the K experts with the largest scores.

        With `ragged` it goes to all experts with a score above -inf, which may be none or all. Scores do not affect the
        experts' weights and get no gradient.
        """
        return candidates.logits_NE


class SteeringWrapper(Steering):
    """Delegates to another steering, `strategy`; subclasses override `logits` or `choice_scores`."""

    strategy: Steering

    def at(self, layer: int) -> Steering:
        """Return the strategy of one layer."""
        return self.strategy.at(layer)

    def logits(self, x_ND: Tensor, weight_ED: Tensor, layer: int) -> Tensor:
        """Return the strategy's logits, (N, E)."""
        return self.strategy.logits(x_ND, weight_ED, layer)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the strategy's scores, (N, E)."""
        return self.strategy.choice_scores(candidates)


class Router(nn.Module):
    """The router of a layer: logits = x W^T; each token goes to the experts with the K largest logits.

    `gating` is softmax (p = softmax(logits)), sigmoid (p = sigmoid(logits)), sqrtsoftplus (p = sqrt(ln(1 + e^logits)))
    or relu (p = max(logits, 0)). With `renormalize` the K weights are divided by their sum; then they are multiplied by
    `scale`. All gatings are monotone, so choosing by probabilities or by logits is the same. Ties go to the lowest
    expert index. A `Steering` may choose by other scores.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int,
        gating: str,
        renormalize: bool,
        layer: int,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.weight_ED = nn.Parameter(torch.empty(num_experts, d_model))
        self.top_k, self.gating, self.renormalize, self.layer = top_k, gating, renormalize, layer
        self.scale = scale
        self.keeps_input = False  # whether `Routing.x_ND` holds the input

    def forward(self, x_ND: Tensor, tokens_BS: Tensor, steering: Steering | None = None) -> Routing:
        """Route the hidden states of B sequences; products are in fp32, or in the input's dtype if that is wider."""
        # access the weight once: a parametrized weight is recomputed at each access
        routing = self.route(x_ND, self.weight_ED, tokens_BS, steering)
        return replace(routing, x_ND=x_ND.detach()) if self.keeps_input else routing

    def route(self, x_ND: Tensor, weight_ED: Tensor, tokens_BS: Tensor, steering: Steering | None) -> Routing:
        """Route with the weight `weight_ED`."""

        def choice_scores(logits_NE: Tensor, probs_NE: Tensor) -> Tensor:
            if steering is None:
                return logits_NE
            return steering.choice_scores(Candidates(self.layer, tokens_BS, logits_NE, probs_NE, self.top_k))

        wide = torch.promote_types(x_ND.dtype, torch.float32)
        here = None if steering is None else steering.at(self.layer)
        with torch.autocast(x_ND.device.type, enabled=False):
            map_to_logits = steering.logits if steering else linear_logits
            logits_NE = map_to_logits(x_ND.to(wide), weight_ED.to(wide), self.layer)
            if here:
                logits_NE = here.adjust_logits(logits_NE)
            return Routing.of_logits(
                logits_NE, self.top_k, weight_ED, len(tokens_BS), self.gating, self.renormalize, choice_scores,
                ragged=here is not None and here.ragged, drops=here is not None and here.drops,
                scale=self.scale,
            )  # fmt: skip

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply `fn`, but keep the dtype of a parametrized weight: matrix decompositions do not support bf16."""
        super()._apply(without_dtype_change(fn) if parametrize.is_parametrized(self) else fn, recurse)  # type: ignore[no-untyped-call]
        return self


def linear_logits(x_ND: Tensor, weight_ED: Tensor, layer: int) -> Tensor:
    """Return x W^T, (N, E), for any layer."""
    return F.linear(x_ND, weight_ED)


def apply_gating(logits_NE: Tensor, gating: str) -> Tensor:
    """Return the softmax over the experts, or the elementwise sigmoid, sqrtsoftplus or relu, (N, E)."""
    if gating == "softmax":
        return logits_NE.softmax(-1)
    if gating == "sqrtsoftplus":
        return F.softplus(logits_NE).clamp(min=SMALLEST).sqrt()  # at 0 the square root has an infinite slope
    return logits_NE.relu() if gating == "relu" else logits_NE.sigmoid()


def log_scores(logits_NE: Tensor, gating: str) -> Tensor:
    """Return log p up to a constant per row, (N, E).

    Its softmax normalizes even scores that are too small to divide by their sum. Scores of 0 (relu) are replaced by the
    smallest normal number: negligible next to other scores, uniform if all scores are 0. They get no gradient.
    """
    if gating == "softmax":
        return logits_NE
    if gating == "sqrtsoftplus":
        return apply_gating(logits_NE, gating).log()
    return logits_NE.clamp(min=SMALLEST).log() if gating == "relu" else F.logsigmoid(logits_NE)


def topk_indices(scores_NE: Tensor, top_k: int) -> Tensor:
    """Return the experts with the K largest scores, (N, K); ties go to the lowest index, unlike in `torch.topk`.

    On a CPU, K passes of argmax are five to ten times as fast as sorting many experts.
    """
    if scores_NE.device.type != "cpu" or 4 * top_k > scores_NE.shape[1]:
        return scores_NE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    remaining_NE = scores_NE.clamp(min=torch.finfo(scores_NE.dtype).min)  # -inf marks chosen experts
    chosen_NK = torch.empty((len(scores_NE), top_k), dtype=torch.int64)
    for k in range(top_k):
        chosen_NK[:, k] = remaining_NE.argmax(-1)
        remaining_NE.scatter_(-1, chosen_NK[:, k : k + 1], -math.inf)
    return chosen_NK


def ragged_indices(scores_NE: Tensor) -> Tensor:
    """Return the experts with scores above -inf, (N, E), the largest first; the remaining slots hold E."""
    sorted_NE = scores_NE.sort(dim=-1, descending=True, stable=True)
    return sorted_NE.indices.masked_fill(sorted_NE.values == -math.inf, scores_NE.shape[1])


def topk_weights(logits_NE: Tensor, probs_NE: Tensor, experts_NK: Tensor, gating: str, renormalize: bool) -> Tensor:
    """Return the chosen experts' probabilities, (N, K), divided by their sum if `renormalize`; 0 in empty slots."""
    empty_NK = experts_NK == logits_NE.shape[-1]
    index_NK = experts_NK.masked_fill(empty_NK, 0)
    if not renormalize:
        return probs_NE.gather(-1, index_NK).masked_fill(empty_NK, 0)
    scores_NK = log_scores(logits_NE.gather(-1, index_NK), gating)
    # with -inf, the gradient of a row without experts would be NaN
    finite_NK = scores_NK.masked_fill(empty_NK, torch.finfo(scores_NK.dtype).min)
    return finite_NK.softmax(-1).masked_fill(empty_NK, 0)


def kept_weights(kept_NE: Tensor, experts_NK: Tensor, weights_NK: Tensor, num_experts: int) -> Tensor:
    """Return the weights of the experts in `kept_NE`, a subset of `experts_NK`, (N, E); 0 in empty slots."""
    table = weights_NK.new_zeros(len(weights_NK), num_experts + 1)  # the last column is for empty slots
    return table.scatter(-1, experts_NK, weights_NK).gather(-1, kept_NE)


def count_tokens(experts_NK: Tensor, num_experts: int) -> Tensor:
    """Return the number of tokens per expert, (E,), as int64, so the order of summation does not matter."""
    slots_R = experts_NK.reshape(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=slots_R.device)  # the last entry is for empty slots
    return counts.scatter_add_(0, slots_R, torch.ones_like(slots_R))[:num_experts]


def without_dtype_change(cast: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the argument `cast` of `nn.Module._apply` restricted to moving tensors between devices."""
    return lambda tensor: tensor.to(cast(tensor.new_empty(0)).device)


@dataclass(frozen=True)
class Groups:
    """Group-limited choice: a token's experts come from its `chosen` best groups, so it is sent to few nodes.

    The score of a group is the largest score of its experts (`score=best`, DeepSeek-V2, arXiv 2405.04434) or the sum of
    the two largest (`best two`, DeepSeek-V3, arXiv 2412.19437). Shapes: G groups of e = E/G consecutive experts, k
    experts in a group's score.
    """

    count: int
    chosen: int
    score: Literal["best", "best two"]

    def limited(self, scores_NE: Tensor) -> Tensor:
        """Return the scores with -inf for experts outside of a token's groups; scores may be negative.

        Ties go to the lowest group.
        """
        if self.chosen == self.count:
            return scores_NE
        scores_NGe = scores_NE.reshape(len(scores_NE), self.count, -1)
        best_NGk = scores_NGe.topk(1 if self.score == "best" else min(2, scores_NGe.shape[2]), dim=2).values
        chosen_NG = topk_indices(best_NGk.sum(2), self.chosen)
        open_NG = torch.zeros_like(scores_NGe[:, :, 0], dtype=torch.bool).scatter(1, chosen_NG, True)
        return scores_NGe.masked_fill(~open_NG[:, :, None], -math.inf).flatten(1)
