"""Top-p routing: a token uses its most probable experts, until their probabilities exceed a share p together.

Reference: arXiv 2403.07652, and its authors' code; its load balancing loss is the strategy `lbl`.
Shapes: N tokens, E experts.
"""

import torch
from torch import Tensor

from simbal.balancing.base import Balancing, Properties
from simbal.config.values import not_negative, share
from simbal.model.router import Candidates, Routing, log_scores


class TopP(Balancing):
    """Token t uses the fewest most probable experts that exceed p together; loss = coef * mean over t of its entropy.

    The probabilities of a token are divided by their sum. The expert that crosses p is used, so that every token has at
    least one. The entropy -sum_i p_ti ln p_ti is what keeps their number from growing; nothing holds it at K.
    """

    citation = "arXiv 2403.07652"
    unit = "the mean entropy of a token in one layer"
    properties = Properties(differentiable=True, scope="token", causal=True, revives_dead_experts=False)
    ragged = True

    def __init__(self, p: float = 0.4, coef: float = 1e-4) -> None:
        """Set the share `p`, in [0, 1), and the multiplier of the entropy.

        The default of `p` is that of the authors' code; that of `coef` is from a summary of the paper.
        """
        super().__init__()
        self.p, self.coef = share("p", p), not_negative("coef", coef)
        self.formula = (
            f"coef * mean over tokens of -sum_i p_ti ln p_ti; t uses its most probable experts until they exceed {p:g}"
        )

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the probabilities, (N, E), with -inf for those behind the one that crosses p."""
        probs_NE = candidates.probs_NE
        sorted_NE, experts_NE = probs_NE.double().sort(dim=-1, descending=True, stable=True)
        sums_NE = sorted_NE.cumsum(-1)
        # of a token that is sure of nothing, as all its sigmoids are 0, every expert is used
        crossed_NE = sums_NE > self.p * sums_NE[:, -1:]
        behind_NE = crossed_NE.roll(1, -1)
        behind_NE[:, 0] = False
        return probs_NE.masked_fill(behind_NE.scatter(-1, experts_NE, behind_NE), -torch.inf)

    def loss(self, routing: Routing) -> Tensor:
        """Return one layer's mean entropy times the coefficient; a scalar."""
        log_NE = log_scores(routing.logits_NE, routing.gating).log_softmax(-1)  # finite where p is 0
        return self.coef * -(log_NE.exp() * log_NE).sum(-1).mean()
