"""Expert overlap: experts whose weights point in different directions.

Reference: the loss is ours; mean squared cosine is how Kim 2026 (arXiv 2601.00457) measures the overlap of weights.
Shapes: E experts, D model width, F width of an expert, P numbers of an expert.
"""

import torch
from torch import Tensor

from simbal.balancing.base import Balancing, Properties
from simbal.config.values import not_negative
from simbal.metrics.similarity import mean_squared_cosine
from simbal.model.router import ExpertWeights, Routing


class ExpertOverlap(Balancing):
    """loss = coef * mean over pairs i != j of cos^2(v_i, v_j), v_i all weights of expert i in one vector.

    It sees weights, and not what they compute: two experts that differ in nothing but the order of their hidden units
    are the same function, and may have a cosine of 0. The router gets no gradient.
    """

    formula = "coef * mean over i != j of cos^2(v_i, v_j), v_i: gate, up and down of expert i in one vector"
    citation = "ours; the measure is that of arXiv 2601.00457"
    properties = Properties(differentiable=True, scope="weights", causal=True, revives_dead_experts=False)
    needs_experts = True

    def __init__(self, coef: float = 1.0) -> None:
        super().__init__()
        self.coef = not_negative("coef", coef)

    def loss(self, routing: Routing) -> Tensor:
        """Return the loss of the layer's experts; a scalar."""
        assert routing.experts is not None, "of our own models alone"
        return self.coef * mean_squared_cosine(in_one_vector(routing.experts))


def in_one_vector(experts: ExpertWeights) -> Tensor:
    """Return all weights of each expert, (E, P)."""
    return torch.cat([experts.w13_E2FD.flatten(1), experts.w2_EFD.flatten(1)], 1)
