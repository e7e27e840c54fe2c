"""The strategy `mine`. It starts as the importance loss, which favors equal mean probabilities of all experts."""

from torch import Tensor

from simbal.balancing.base import Balancing, Properties
from simbal.model.router import Routing


class Mine(Balancing):
    """loss = coef * (E sum_i P_i^2 - 1), where P_i is the mean probability of expert i over a micro-batch."""

    formula = "coef * (E sum_i P_i^2 - 1)"
    citation = "arXiv 1701.06538, equation 7"
    properties = Properties(differentiable=True, scope="micro", causal=True, revives_dead_experts=True)

    def __init__(self, coef: float = 0.01) -> None:
        super().__init__()
        self.coef = coef

    def loss(self, routing: Routing) -> Tensor:
        """Return the loss of one layer."""
        p_E = routing.distribution_NE.mean(0)
        return self.coef * (len(p_E) * p_E.square().sum() - 1)
