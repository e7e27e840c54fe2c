"""Dynamic quantile balancing: an expert takes every token whose score exceeds the quantile of the steps before.

Reference: J. Su, kexue.fm 11626, of which the derivation alone has been read: quantile balancing without the bound on a
token's number of experts. From one step to the next, and smoothed, which is ours.
Shapes: N tokens, L MoE layers, E experts, K experts per token on average.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from simbal.balancing.expert_threshold import ExpertThreshold
from simbal.config.values import share
from simbal.model.router import Candidates, Routing


class DynamicQuantile(ExpertThreshold):
    """Token t uses expert i if s_ti > beta_i, beta_i = (NK/E + 1)-th largest s_ti over t, s being the gated scores.

    After step n, beta moves towards the mean of these over micro-batches and ranks by the share (1 - smoothing) /
    (1 - smoothing^n) of the way. Before the first step each token has its K largest. It is `ExpertThreshold` with
    another cutoff.
    """

    formula = "no loss; t uses i if s_ti > beta_i, beta_i: running mean over steps of the (NK/E + 1)-th largest s_ti"
    citation = "kexue.fm 11626"

    def __init__(self, num_layers: int = 0, num_experts: int = 0, smoothing: float = 0.9) -> None:
        """Set the share of the old mean that stays, `smoothing` in [0, 1); the sizes are as in `LossFree`."""
        super().__init__(num_layers, num_experts, share("smoothing", smoothing))

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the gated scores, (N, E), with -inf where they are not above beta."""
        return self.reaching(candidates.probs_NE, candidates)

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the smallest score above beta of each expert, (L, E)."""
        scores = [routing.probs_NE.detach().to(self.threshold_LE.dtype) for routing in routings]
        return torch.stack([smallest_above(scores_NE, routings[0].top_k) for scores_NE in scores])


def smallest_above(scores_NE: Tensor, top_k: int) -> Tensor:
    """Return the next number above the (NK/E + 1)-th largest score of each expert, (E,); NK/E is rounded down.

    To reach it is to exceed that score, in the dtype of `scores_NE`.
    """
    num_tokens, num_experts = scores_NE.shape
    beta_E = scores_NE.topk(num_tokens * top_k // num_experts + 1, dim=0).values[-1]
    return beta_E.nextafter(torch.full_like(beta_E, torch.inf))
