"""Expert threshold: an expert takes every token whose logit reaches its own threshold, which follows its load.

Reference: arXiv 2603.11535, without its warm-up by expert choice, which looks ahead, and without its shared expert.
Shapes: N tokens, L MoE layers, E experts, K experts per token on average.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing, FinishedStep, Properties, require_unchosen
from simbal.balancing.choice_bias import layer_bias
from simbal.config.values import share
from simbal.model.router import Candidates, Router, Routing


class ExpertThreshold(Balancing):
    """Token t uses expert i if z_ti >= c_i, with c_i the running mean of i's cutoffs; as many experts as that makes.

    The cutoff of a micro-batch is the NK/E-th largest logit of the expert in it. After step n, c moves towards the mean
    cutoff by (1 - decay) / (1 - decay^n) of the way: the exponential mean from 0, divided by the sum of its weights.
    Before the first step each token has its K largest.
    """

    formula = "no loss; t uses i if z_ti >= c_i, c_i: running mean over steps of the NK/E-th largest logit of i"
    citation = "arXiv 2603.11535"
    properties = Properties(differentiable=False, scope="micro", causal=True, revives_dead_experts=True)
    ragged = True

    def __init__(self, num_layers: int = 0, num_experts: int = 0, decay: float = 0.99) -> None:
        """Set the share of the old mean that stays, `decay` in [0, 1); the sizes are as in `LossFree`."""
        super().__init__()
        self.decay = share("decay", decay)
        self.threshold_LE: Tensor = nn.Buffer(torch.zeros(num_layers, num_experts))
        self.steps: Tensor = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def prepare(self, routers: Sequence[Router]) -> None:
        """Make the thresholds, one number for each layer and expert.

        Raises:
            UserError: every expert is chosen, or the thresholds were made for another model.
        """
        require_unchosen(routers)
        self.threshold_LE = layer_bias(self.threshold_LE, routers)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the logits, (N, E), with -inf where they are below the threshold."""
        return self.reaching(candidates.logits_NE, candidates)

    def reaching(self, scores_NE: Tensor, candidates: Candidates) -> Tensor:
        """Return scores, (N, E), with -inf where they are below the threshold; before the first step all but K."""
        scores_NE = scores_NE.to(self.threshold_LE.dtype)  # rounded as the threshold is, which may be one of them
        own_N1 = scores_NE.topk(candidates.top_k).values[:, -1:]
        # no `if`, which would wait for the device
        threshold_NE = torch.where(self.steps > 0, self.threshold_LE[candidates.layer], own_N1)
        return scores_NE.masked_fill(scores_NE < threshold_NE, -torch.inf)

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the cutoff of each expert, (L, E)."""
        return torch.stack([cutoff(routing.logits_NE.detach(), routing.top_k) for routing in routings])

    def update(self, step: FinishedStep) -> None:
        """Take the mean cutoff over micro-batches and ranks into the running mean."""
        self.steps.add_(1)
        weight = (1 - self.decay) / (1 - self.decay ** self.steps.double())  # in fp64 exactly 1 at first
        mean_LE = (step.measured_LE / step.num_measured).to(self.threshold_LE.dtype)
        self.threshold_LE.lerp_(mean_LE, weight.to(mean_LE.dtype))


def cutoff(logits_NE: Tensor, top_k: int) -> Tensor:
    """Return the NK/E-th largest logit of each expert over the tokens, (E,); NK/E is rounded down, and at least 1."""
    num_tokens, num_experts = logits_NE.shape
    return logits_NE.topk(max(1, num_tokens * top_k // num_experts), dim=0).values[-1]
