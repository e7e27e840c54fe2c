"""Gating logit normalisation: every token's logits get the same spread, so that no token routes evenly.

Reference: Skywork-MoE (arXiv 2406.06563), gating logit normalization.
Shapes: N tokens, E experts.
"""

from torch import Tensor

from simbal.balancing.base import Balancing, Properties
from simbal.balancing.cosine import positive_scale

VARIANCE_FLOOR = 1e-12  # of a token whose logits are all equal


class LogitNorm(Balancing):
    """logits' = scale * (logits - mean) / std over the experts of each token, before the gating."""

    formula = "no loss; logits' = scale * (logits - mean_E) / std_E before the gating"
    citation = "arXiv 2406.06563"
    properties = Properties(differentiable=False, scope="token", causal=True, revives_dead_experts=False)

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = positive_scale(scale)

    def adjust_logits(self, logits_NE: Tensor) -> Tensor:
        """Return the normalised logits, (N, E); the standard deviation is over all E, not E - 1."""
        centred_NE = logits_NE - logits_NE.mean(-1, keepdim=True)
        variance_N1 = centred_NE.square().mean(-1, keepdim=True)
        return self.scale * centred_NE * (variance_N1 + VARIANCE_FLOOR).rsqrt()
