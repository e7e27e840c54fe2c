"""Prototype routers: an expert's router row is the running mean of the hidden states that came to it, as in k-means.

Reference: the online k-means router of arXiv 2605.12476, by its abstract; decay, scale and start are ours.
Shapes: N tokens, L MoE layers, E experts, D model width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from simbal.balancing.base import Balancing, FinishedStep, Properties
from simbal.balancing.cosine import positive_scale, row_cosines
from simbal.config.values import share
from simbal.metrics.routing import chosen_experts
from simbal.model.router import Router, Routing


class PrototypeRouter(Balancing):
    """logits = scale * cos(x, w_i); after each step w_i = decay * w_i + (1 - decay) * mean of the x that chose i.

    The router's weight W is the prototypes: no gradient, optimizer or weight decay moves it, it starts as
    `router.init` says, and its file of weights holds it. The mean is over all tokens of the step, each of whose K
    experts takes it in full; an expert without any keeps its row. In bf16-true, W is in bf16, where changes below a
    256th of a number are lost.

    A layer keeps its router's input until the step is measured, N D numbers which the backward pass keeps as well
    unless activations are recomputed, and multiplies as much again as the router does.
    """

    formula = "no loss; logits = scale * cos(x, w_i), w_i: running mean over steps of the mean x that chose i"
    citation = "arXiv 2605.12476; decay, scale and start ours"
    sets_router_weight = True
    properties = Properties(differentiable=False, scope="global", causal=True, revives_dead_experts=False)

    def __init__(self, decay: float = 0.99, scale: float = 10.0) -> None:
        """Set the share of the old row that stays, `decay` in [0, 1), and the largest logit, `scale`."""
        super().__init__()
        self.decay, self.scale = share("decay", decay), positive_scale(scale)

    def prepare(self, routers: Sequence[Router]) -> None:
        """Take every router's weight out of training, and ask for what goes into it."""
        for router in routers:
            router.weight_ED.requires_grad_(False)
            router.keeps_input = True

    def logits(self, x_ND: Tensor, weight_ED: Tensor, layer: int) -> Tensor:
        """Return the scaled cosines, (N, E)."""
        return self.scale * row_cosines(x_ND, weight_ED)

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the sum of the hidden states that chose each expert, and their number, (L, E, D+1)."""
        return torch.stack([sums_and_number(routing) for routing in routings])

    def update(self, step: FinishedStep) -> None:
        """Move the prototypes towards the means of the step."""
        for weight_ED, measured_EM in zip(step.router_weights, step.measured_LE, strict=True):
            sums_ED, number_E1 = measured_EM[:, :-1], measured_EM[:, -1:]
            moved_ED = torch.lerp(sums_ED / number_E1, weight_ED.to(sums_ED.dtype), self.decay)
            weight_ED.copy_(torch.where(number_E1 > 0, moved_ED, weight_ED))


def sums_and_number(routing: Routing) -> Tensor:
    """Return, of each expert, the sum of the hidden states that chose it and their number, (E, D+1), fp32 at least."""
    assert routing.x_ND is not None, "the router was asked to keep its input"
    x_ND = routing.x_ND.to(torch.promote_types(routing.x_ND.dtype, torch.float32))
    chosen_NE = chosen_experts(routing.topk_experts_NK, routing.logits_NE.shape[1]).to(x_ND.dtype)
    with torch.autocast(x_ND.device.type, enabled=False):
        return torch.cat([chosen_NE.T @ x_ND, chosen_NE.sum(0)[:, None]], 1)
