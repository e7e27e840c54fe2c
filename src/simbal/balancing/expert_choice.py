"""Expert choice: every expert takes its best tokens of the micro-batch, and a token has as many experts as take it.

Reference: arXiv 2202.09368. A threshold in evaluation, from the running mean of the cutoffs: arXiv 2603.11535.
Shapes: N tokens, L MoE layers, E experts, K experts per token on average.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from simbal.balancing.base import Properties
from simbal.balancing.capacity import checked_factor, even_load
from simbal.balancing.expert_threshold import ExpertThreshold
from simbal.model.router import Candidates, Routing


class ExpertChoice(ExpertThreshold):
    """In training expert i takes the C = capacity_factor N K / E tokens with its largest p_ti, p after the gating.

    Not causal: whether a token is taken depends on those after it, which a model can learn to use. Evaluation cannot:
    there token t uses i if p_ti >= c_i, the running mean over steps of the smallest p_ti that i has taken, as
    `ExpertThreshold` has it; before the first step each token has its K most probable.
    """

    citation = "arXiv 2202.09368; evaluation: arXiv 2603.11535"
    properties = Properties(differentiable=False, scope="micro", causal=False, revives_dead_experts=True)

    def __init__(
        self, num_layers: int = 0, num_experts: int = 0, capacity_factor: float = 1.0, decay: float = 0.99
    ) -> None:
        """Set how many tokens an expert takes, and the `decay` of the mean; the sizes are as in `LossFree`."""
        super().__init__(num_layers, num_experts, decay)
        self.capacity_factor = checked_factor(capacity_factor)
        self.formula = (
            f"no loss; in training i takes its {capacity_factor:g} NK/E largest p_ti; in evaluation t uses i if "
            "p_ti >= c_i, c_i: running mean over steps of the smallest p_ti that i took"
        )

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the probabilities, (N, E), with -inf where the expert does not take the token."""
        probs_NE = candidates.probs_NE
        if not self.training:
            return self.reaching(probs_NE, candidates)
        taken_CE = best_tokens(probs_NE, candidates.top_k, self.capacity_factor)
        left_out = torch.full_like(probs_NE, -torch.inf)
        return left_out.scatter(0, taken_CE, probs_NE.gather(0, taken_CE))

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the smallest probability that each expert has taken, (L, E)."""
        smallest = []
        for routing in routings:
            probs_NE = routing.probs_NE.detach()
            last_1E = best_tokens(probs_NE, routing.top_k, self.capacity_factor)[-1:]
            smallest.append(probs_NE.gather(0, last_1E)[0])
        return torch.stack(smallest)


def best_tokens(scores_NE: Tensor, top_k: int, capacity_factor: float) -> Tensor:
    """Return the C tokens with each expert's largest scores, (C, E), the largest first; ties go to the first token.

    C is capacity_factor N K / E rounded down, but at least 1 and at most N.
    """
    capacity = max(1, math.floor(even_load(scores_NE, top_k, capacity_factor)))
    return scores_NE.sort(dim=0, descending=True, stable=True).indices[:capacity]
