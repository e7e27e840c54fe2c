"""Quantile balancing: the bias that would have balanced the last step, read off its scores.

Reference: BIP-based balancing (arXiv 2502.15451), one round of its dual update per step, not clipped at 0; averaged
over a step and smoothed over steps, which is ours.
Shapes: N tokens, L MoE layers, E experts, K experts per token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing, FinishedStep, Properties, require_unchosen
from simbal.balancing.choice_bias import layer_bias
from simbal.config.values import share
from simbal.model.router import Candidates, Router, Routing


class QuantileBalancing(Balancing):
    """choice = top K of s - b; alpha_t = (K+1)-th largest of s_t - b; b_i' = (NK/E + 1)-th largest of s_ti - alpha_t.

    alpha_t is the score that a token's experts beat, b_i the surplus that only NK/E tokens have for expert i. After a
    step b becomes smoothing * b + (1 - smoothing) * mean of b' over its micro-batches and ranks, less its own mean.
    """

    formula = (
        "no loss; choice by s - b, alpha_t = (K+1)-th largest of s_t - b, "
        "b_i = (NK/E + 1)-th largest of s_ti - alpha_t, smoothed over steps, centred"
    )
    citation = "arXiv 2502.15451"
    properties = Properties(differentiable=False, scope="micro", causal=True, revives_dead_experts=True)

    def __init__(self, num_layers: int = 0, num_experts: int = 0, smoothing: float = 0.9) -> None:
        """Set the share of the old bias that stays, `smoothing` in [0, 1); the sizes are as in `LossFree`."""
        super().__init__()
        self.smoothing = share("smoothing", smoothing)
        self.bias_LE: Tensor = nn.Buffer(torch.zeros(num_layers, num_experts))

    def prepare(self, routers: Sequence[Router]) -> None:
        """Make the bias, one number for each layer and expert.

        Raises:
            UserError: every expert is chosen, or the bias was made for another model.
        """
        require_unchosen(routers)
        self.bias_LE = layer_bias(self.bias_LE, routers)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return gated scores less the layer's bias, (N, E)."""
        return candidates.probs_NE - self.bias_LE[candidates.layer]

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the bias that would balance these tokens, (L, E)."""
        return torch.stack(
            [
                surplus(routing.probs_NE.detach(), bias_E, routing.top_k)
                for routing, bias_E in zip(routings, self.bias_LE, strict=True)
            ]
        )

    def update(self, step: FinishedStep) -> None:
        """Move the bias towards the centred mean over the micro-batches."""
        mean_LE = step.measured_LE / step.num_measured
        centred_LE = mean_LE - mean_LE.mean(1, keepdim=True)
        self.bias_LE.lerp_(centred_LE.to(self.bias_LE.dtype), 1 - self.smoothing)


def surplus(scores_NE: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """Return b_i = (NK/E + 1)-th largest over tokens of s_ti - alpha_t, (E,); NK/E is rounded down.

    alpha_t is the (K+1)-th largest of s_t - b.
    """
    num_tokens, num_experts = scores_NE.shape
    alpha_N1 = (scores_NE - bias_E).topk(top_k + 1, dim=1).values[:, -1:]
    capacity = num_tokens * top_k // num_experts
    return (scores_NE - alpha_N1).topk(capacity + 1, dim=0).values[-1]
