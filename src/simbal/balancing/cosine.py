"""Cosine routers: a logit is the cosine of hidden state and router row, whatever their lengths.

Reference: X-MoE (arXiv 2204.09179) and tutel's CosineTopKGate, both with a projection of x to fewer channels first and
a scale that is learnt; here neither.
Shapes: N tokens, E experts, D model width.
"""

import torch.nn.functional as F
from torch import Tensor

from simbal.balancing.base import Balancing, Properties
from simbal.config.values import not_negative
from simbal.errors import UserError


class CosineRouter(Balancing):
    """logits = scale * cos(x, w_i): long rows attract no more tokens than short ones."""

    formula = "no loss; logits = scale * cos(x, w_i)"
    citation = "arXiv 2204.09179, without its projection and with a fixed scale"
    properties = Properties(differentiable=False, scope="token", causal=True, revives_dead_experts=False)

    def __init__(self, scale: float = 10.0) -> None:
        """Set the largest logit, `scale`."""
        super().__init__()
        self.scale = positive_scale(scale)

    def logits(self, x_ND: Tensor, weight_ED: Tensor, layer: int) -> Tensor:
        """Return the scaled cosines, (N, E)."""
        return self.scale * row_cosines(x_ND, weight_ED)


def positive_scale(scale: float) -> float:
    """Return `scale`; `UserError` unless it is above 0."""
    if not not_negative("scale", scale):
        raise UserError(f"scale={scale} must be above 0: all experts of a token would have the same logit")
    return float(scale)


def row_cosines(x_ND: Tensor, rows_ED: Tensor) -> Tensor:
    """Return the cosine of each hidden state and each row, (N, E); 0 if either is 0."""
    return F.linear(F.normalize(x_ND, dim=-1), F.normalize(rows_ED, dim=-1))
