"""Router z-loss: keep the router's logits small.

Reference: ST-MoE (arXiv 2202.08906), equation 5.
Shapes: N tokens, E experts.
"""

from torch import Tensor

from simbal.balancing.base import Balancing, Properties
from simbal.config.values import not_negative
from simbal.model.router import Routing


class RouterZLoss(Balancing):
    """loss = coef * mean over tokens of (logsumexp_E logits)^2; it balances nothing by itself."""

    formula = "coef * mean over tokens of (logsumexp_E logits)^2"
    citation = "arXiv 2202.08906, equation 5"
    properties = Properties(differentiable=True, scope="token", causal=True, revives_dead_experts=False)

    def __init__(self, coef: float = 0.001) -> None:
        super().__init__()
        self.coef = not_negative("coef", coef)

    def loss(self, routing: Routing) -> Tensor:
        """Return the loss of the logits that go into the gating; a scalar."""
        return self.coef * routing.logits_NE.logsumexp(-1).square().mean()
