"""Makes the MoE layers of a run leave out chosen experts, which are then not computed.

Shapes: B sequences, S sequence length, N = B*S tokens, L MoE layers, K experts per token, D model width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from simbal.analysis.shared.subject import Pruned
from simbal.experts.dispatch import RoutingPlan
from simbal.experts.select import apply_experts
from simbal.model.moe import FeedForward, MoELayer
from simbal.model.router import Routing, Steering

Forward = Callable[[Tensor, Tensor, Steering | None], tuple[Tensor, Routing]]


def kept_plan(experts_NK: Tensor, weights_NK: Tensor, kept_NK: Tensor, num_experts: int) -> RoutingPlan:
    """Return a plan with rows for the kept choices only, for a forward pass.

    `weights_NK` are 0 where nothing is kept. A slot without a row points at some other's, which its weight 0 takes
    away: backends need no case of their own, and with everything kept the plan is the usual one.
    """
    plan = RoutingPlan.build(experts_NK.masked_fill(~kept_NK, num_experts), weights_NK, num_experts)
    rows = int(plan.ends_E[-1])  # choices that are not kept were sorted behind the last expert
    return RoutingPlan(weights_NK, plan.order_R[:rows], plan.inverse_R.clamp(max=max(rows - 1, 0)), plan.ends_E)


@contextmanager
def pruned(feed_forwards: Sequence[MoELayer | FeedForward], pruning: Pruned) -> Iterator[list[int]]:
    """Make the layers prune within the block; yield how many choices each has kept so far. For inference only."""
    layers = [layer for layer in feed_forwards if isinstance(layer, MoELayer)]
    kept_L = [0] * len(layers)
    for index, layer in enumerate(layers):
        layer.forward = _forward(layer, pruning, kept_L, index)  # type: ignore[assignment, method-assign]
    try:
        yield kept_L
    finally:
        for layer in layers:
            del layer.forward  # the class's own is back


def _forward(layer: MoELayer, pruning: Pruned, kept_L: list[int], index: int) -> Forward:
    def forward(x_BSD: Tensor, tokens_BS: Tensor, steering: Steering | None = None) -> tuple[Tensor, Routing]:
        x_ND = x_BSD.flatten(0, 1)
        routing = layer.router(x_ND, tokens_BS, steering)
        kept_NK = pruning.kept(routing.topk_probs_NK)
        weights_NK = pruning.weights(routing.topk_probs_NK, kept_NK)
        plan = kept_plan(routing.topk_experts_NK, weights_NK, kept_NK, len(layer.w2_EFD))
        kept_L[index] += len(plan.order_R)
        if not len(plan.order_R):
            return layer.with_shared(torch.zeros_like(x_BSD), x_BSD), routing
        y_ND = apply_experts(layer.backend, x_ND, plan, layer.w13_E2FD, layer.w2_EFD, layer.biases)
        return layer.with_shared(y_ND.view_as(x_BSD), x_BSD), routing

    return forward
