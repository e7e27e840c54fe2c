"""MoE layers that compute only the experts which a threshold on the weights keeps.

Reference: dynamic-k pruning, arXiv 2506.14038, section 4.4 and table 6.
Shapes: B sequences, S sequence length, N = B*S tokens, D model width, E experts, K experts per token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from simbal.experts.plan import RoutingPlan
from simbal.experts.select import apply_experts
from simbal.model.moe import FeedForward, MoELayer
from simbal.model.router import Routing, Steering

Forward = Callable[[Tensor, Tensor, Steering | None], tuple[Tensor, Routing]]


@dataclass(frozen=True)
class Pruning:
    """Keep the chosen experts with w_k >= threshold, or >= threshold * max_k w_k; w are weights divided by their sum.

    The kept weights stay what they were, or with `renorm_after` are scaled so that their sum stays what it was.
    """

    threshold: float
    rule: str  # absolute | relative
    renorm_after: bool
    allow_none: bool  # a token may lose all its experts; else the one of the largest weight stays

    def kept(self, weights_NK: Tensor) -> Tensor:
        """(N, K) bool: which choices stay."""
        sum_N1 = weights_NK.sum(1, keepdim=True)
        shares_NK = weights_NK / sum_N1.where(sum_N1 > 0, 1)  # sigmoids can all be 0
        largest_N1 = shares_NK.amax(1, keepdim=True)
        kept_NK = shares_NK >= (self.threshold * largest_N1 if self.rule == "relative" else self.threshold)
        if self.allow_none:
            return kept_NK
        first_N1 = shares_NK.argmax(1, keepdim=True)
        return kept_NK.scatter(1, first_N1, True)

    def weights(self, weights_NK: Tensor, kept_NK: Tensor) -> Tensor:
        """What is applied to the experts' outputs: 0 for one that goes."""
        left_NK = weights_NK.masked_fill(~kept_NK, 0)
        if not self.renorm_after:
            return left_NK
        left_N1 = left_NK.sum(1, keepdim=True)
        return left_NK * (weights_NK.sum(1, keepdim=True) / left_N1.where(left_N1 > 0, 1))


def kept_plan(experts_NK: Tensor, weights_NK: Tensor, kept_NK: Tensor, num_experts: int) -> RoutingPlan:
    """A plan with rows for the kept choices only, for a forward pass; `weights_NK` are 0 where nothing is kept.

    A slot without a row points at some other's, which its weight 0 takes away: backends need no case of their own, and
    with everything kept the plan is the usual one.
    """
    plan = RoutingPlan.build(experts_NK.masked_fill(~kept_NK, num_experts), weights_NK, num_experts)
    rows = int(plan.ends_E[-1])  # what goes was sorted behind the last expert
    return RoutingPlan(weights_NK, plan.order_R[:rows], plan.inverse_R.clamp(max=max(rows - 1, 0)), plan.ends_E)


@contextmanager
def pruned(feed_forwards: Sequence[MoELayer | FeedForward], pruning: Pruning) -> Iterator[list[int]]:
    """Within it the layers prune; yields how many choices each layer has kept so far. For inference only."""
    layers = [layer for layer in feed_forwards if isinstance(layer, MoELayer)]
    kept_L = [0] * len(layers)
    for index, layer in enumerate(layers):
        layer.forward = _forward(layer, pruning, kept_L, index)  # type: ignore[assignment, method-assign]
    try:
        yield kept_L
    finally:
        for layer in layers:
            del layer.forward  # the class's own is back


def _forward(layer: MoELayer, pruning: Pruning, kept_L: list[int], index: int) -> Forward:
    def forward(x_BSD: Tensor, tokens_BS: Tensor, steering: Steering | None = None) -> tuple[Tensor, Routing]:
        x_ND = x_BSD.flatten(0, 1)
        routing = layer.router(x_ND, tokens_BS, steering)
        kept_NK = pruning.kept(routing.topk_probs_NK)
        weights_NK = pruning.weights(routing.topk_probs_NK, kept_NK)
        plan = kept_plan(routing.topk_experts_NK, weights_NK, kept_NK, len(layer.w2_EFD))
        kept_L[index] += len(plan.order_R)
        if not len(plan.order_R):
            return torch.zeros_like(x_BSD), routing
        y_ND = apply_experts(layer.backend, x_ND, plan, layer.w13_E2FD, layer.w2_EFD)
        return y_ND.view_as(x_BSD), routing

    return forward
