"""The load balancing loss: experts chosen often are made less probable.

Reference: arXiv 2506.14038, equation 3; Switch Transformers (arXiv 2101.03961).
Shapes: B sequences, S sequence length, N = B*S tokens, E experts, K experts per token.
"""

import torch
from torch import Tensor

from simbal.balancing.base import Balancing, checked_coef
from simbal.model.router import Routing


class LoadBalancingLoss(Balancing):
    """loss = coef * mean over sequences of E sum_i f_i P_i.

    f_i is the share of a sequence's tokens sent to expert i (sums to K, no gradient), P_i their mean probability of i.
    Uniform routing gives K * coef; that is a stationary point, not a lower bound.
    """

    formula = "coef * E * sum_i f_i P_i, per sequence, mean over sequences; sum_i f_i = K, sum_i P_i = 1"
    citation = "arXiv 2506.14038, equation 3; arXiv 2101.03961"

    def __init__(self, coef: float) -> None:
        super().__init__()
        self.coef = checked_coef("lbl", coef)

    def loss(self, routing: Routing) -> Tensor:
        """Scaled `load_balancing_loss`."""
        return self.coef * load_balancing_loss(routing)


def load_balancing_loss(routing: Routing) -> Tensor:
    """E sum_i f_i P_i of each sequence, averaged over sequences."""
    num_experts = routing.probs_NE.shape[-1]
    shape = (routing.num_sequences, -1, num_experts)
    chosen_NE = torch.zeros_like(routing.probs_NE).scatter_(-1, routing.topk_experts_NK, 1.0)
    f_BE = chosen_NE.view(shape).mean(1)
    p_BE = routing.distribution_NE.view(shape).mean(1)
    return num_experts * (f_BE * p_BE).sum(-1).mean()
