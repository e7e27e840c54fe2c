"""Sinkhorn routing: choose on logits that have been shifted until every expert is wanted equally.

Reference: S-BASE (Clark et al. 2022, arXiv 2202.01169), as in Megatron-LM.
Shapes: N tokens, E experts.
"""

import math

import torch
from torch import Tensor

from simbal.balancing.base import Balancing, Properties
from simbal.config.values import whole_number
from simbal.model.router import Candidates


class Sinkhorn(Balancing):
    """choice = top K of z_te + v_e, where u, v make exp(z_te + u_t + v_e) sum to 1 for each t and to N/E for each e.

    In training only; in evaluation the plain top K. Not causal: v depends on all tokens of the micro-batch.
    """

    citation = "arXiv 2202.01169"
    properties = Properties(differentiable=False, scope="micro", causal=False, revives_dead_experts=True)

    def __init__(self, iterations: int = 10) -> None:
        super().__init__()
        self.iterations = whole_number("iterations", iterations, 1)
        self.formula = f"no loss; in training choice by logits + v, v from {iterations} Sinkhorn iterations"

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return logits plus v, (N, E), which is the same for all tokens; in evaluation the logits."""
        logits_NE = candidates.logits_NE
        return logits_NE + expert_potential(logits_NE, self.iterations) if self.training else logits_NE


def expert_potential(logits_NE: Tensor, iterations: int) -> Tensor:
    """Return v, (E,): rows and columns are normalised in turn, in log space; the columns come last."""
    num_tokens, num_experts = logits_NE.shape
    v_E = logits_NE.new_zeros(num_experts)
    for _ in range(iterations):
        u_N1 = -torch.logsumexp(logits_NE + v_E, 1, keepdim=True)
        v_E = math.log(num_tokens / num_experts) - torch.logsumexp(logits_NE + u_N1, 0)
    return v_E
