"""The load balancing loss as the `transformers` library computes it: over the tokens of all layers together.

Reference: `load_balancing_loss_func` of transformers' Mixtral and OLMoE.
Shapes: N tokens, L MoE layers, E experts, K experts per token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from simbal.balancing.base import Balancing, Properties
from simbal.config.values import not_negative
from simbal.model.router import Routing, count


class PooledLoadBalancingLoss(Balancing):
    """loss = coef * E sum_i f_i P_i, with f and P over the tokens of all layers together.

    Opposite imbalances of two layers cancel in it: it can be lowest while every layer is uneven.
    """

    formula = "coef * E * sum_i f_i P_i; f_i, P_i: share and mean probability over the tokens of all layers together"
    citation = "transformers, load_balancing_loss_func"
    unit = "OLMoE's loss, (E/K) sum_i f_i P_i averaged over layers"
    over_layers = "mean"  # every layer gets the same value
    properties = Properties(
        differentiable=True, scope="micro", causal=True, revives_dead_experts=True, mixes_layers=True
    )

    def __init__(self, coef: float = 0.01) -> None:
        super().__init__()
        self.coef = not_negative("coef", coef)

    def losses(self, routings: Sequence[Routing], step_counts_LE: Tensor | None) -> Tensor:
        """Return every layer's loss, (L,), the same value for each."""
        num_tokens, num_experts = routings[0].probs_NE.shape
        f_E = self.measure(routings).sum(0) / (num_tokens * len(routings))
        p_E = torch.cat([routing.distribution_NE for routing in routings]).mean(0)
        return (self.coef * num_experts * (f_E * p_E).sum()).expand(len(routings))

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the number of tokens whose K largest logits hold each expert, (L, E)."""
        return torch.stack([count(routing.unsteered_experts_NK, routing.probs_NE.shape[1]) for routing in routings])

    def effective_coef(self, num_layers: int, top_k: int) -> float:
        """Return coef * K."""
        return self.coef * top_k
