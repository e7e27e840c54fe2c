"""Routing with a varying number of experts per token, and a loss that limits it.

Reference: ReMoE (arXiv 2412.14711) and top-p routing (arXiv 2403.07652), and their authors' code; the load-balancing
loss of top-p routing is the strategy `lbl`.
Shapes: N tokens, L MoE layers, E experts, K experts per token on average.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing, FinishedStep, Properties, require_unused_experts
from simbal.config.values import check_fraction, check_nonnegative
from simbal.errors import UserError
from simbal.model.router import Candidates, Router, Routing, log_scores


class ReMoE(Balancing):
    """Token t uses expert i if z_ti > 0, with weight z_ti; loss = lambda E sum_i f_i P_i, P_i = mean over t of r_ti.

    r = max(z, 0), and f_i is the number of tokens that use i divided by N K, without gradient. If not `balanced`, the
    loss is lambda times the mean over t of sum_i r_ti. lambda = coef * alpha^m is one number for the model. m starts at
    0. After a step, m increases by 1 if tokens used more than K experts on average over layers, micro-batches and
    ranks, and decreases by 1 if they used fewer. Storing m instead of lambda avoids underflow.
    """

    citation = "arXiv 2412.14711"
    gatings = ("relu",)
    ragged = True

    def __init__(self, coef: float = 1e-8, alpha: float = 1.2, balanced: bool = True) -> None:
        """Initialize the loss.

        Args:
            coef: initial lambda.
            alpha: factor by which lambda changes per step, above 1.
            balanced: weight each expert's penalty by its load.
        """
        super().__init__()
        if not alpha > 1:
            raise UserError(f"alpha={alpha} must be above 1")
        self.coef, self.alpha, self.balanced = check_nonnegative("coef", coef), alpha, balanced
        self.raised: Tensor = nn.Buffer(torch.zeros((), dtype=torch.int64))  # m
        self.unit = "E sum_i f_i r_i in one layer" if balanced else "sum_i r_i in one layer"
        self.formula = (
            f"lambda * {'E sum_i f_i r_i' if balanced else 'sum_i r_i'}, r_i: mean over tokens of max(z_ti, 0); "
            f"{'f_i: uses of i / (N K); ' if balanced else ''}t uses i if z_ti > 0; lambda starts at coef, is "
            f"multiplied by {alpha:g} after a step with more than K experts per token, divided after one with fewer"
        )
        self.properties = Properties(
            differentiable=True,
            scope="micro" if balanced else "global",
            causal=True,
            revives_dead_experts=False,  # logits below 0 have no gradient
        )

    def prepare(self, routers: Sequence[Router]) -> None:
        """Raise `UserError` unless the routers' weights are the positive logits."""
        require_unused_experts(routers)
        if any(router.gating != "relu" or router.renormalize for router in routers):
            raise UserError(
                "balancing=remoe needs router=relu with router.renormalize=false: omit router=, because "
                "balancing=remoe sets both"
            )

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the logits, (N, E), with -inf where they are not positive."""
        return candidates.logits_NE.masked_fill(candidates.logits_NE <= 0, -torch.inf)

    def loss(self, routing: Routing) -> Tensor:
        """Return one layer's loss with the current lambda, a scalar."""
        r_E = routing.probs_NE.mean(0)
        if self.balanced:
            num_tokens, num_experts = routing.probs_NE.shape
            r_E = num_experts * routing.tokens_per_expert_E / (num_tokens * routing.top_k) * r_E
        return self.coef * (self.alpha ** self.raised.double()).to(r_E.dtype) * r_E.sum()

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the number of used experts minus K, summed over tokens, (L,)."""
        return torch.stack([r.tokens_per_expert_E.sum() - len(r.probs_NE) * r.top_k for r in routings])

    def update(self, step: FinishedStep) -> None:
        """Raise or lower lambda. Skipped if coef or the schedule is 0, because lambda would grow without bound."""
        if self.coef * step.factor > 0:
            self.raised.add_(step.measured_LE.sum().sign())


class TopP(Balancing):
    """Token t uses its most probable experts until their sum exceeds p; loss = coef * mean entropy per token.

    A token's probabilities are divided by their sum. The expert that crosses p is included, so every token has at least
    one expert. The entropy -sum_i p_ti ln p_ti limits their number; no term keeps it at K.
    """

    citation = "arXiv 2403.07652"
    unit = "the mean entropy of a token in one layer"
    properties = Properties(differentiable=True, scope="token", causal=True, revives_dead_experts=False)
    ragged = True

    def __init__(self, p: float = 0.4, coef: float = 1e-4) -> None:
        """Set the probability `p`, in [0, 1), and the multiplier of the entropy.

        The default of `p` is from the authors' code, the default of `coef` from a summary of the paper.
        """
        super().__init__()
        self.p, self.coef = check_fraction("p", p), check_nonnegative("coef", coef)
        self.formula = (
            f"coef * mean over tokens of -sum_i p_ti ln p_ti; t uses its most probable experts until they exceed {p:g}"
        )

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the probabilities, (N, E), with -inf for the experts after the sum exceeds p."""
        probs_NE = candidates.probs_NE
        sorted_NE, experts_NE = probs_NE.double().sort(dim=-1, descending=True, stable=True)
        sums_NE = sorted_NE.cumsum(-1)
        # `>` is false for a token whose sigmoids are all 0, so it uses every expert
        crossed_NE = sums_NE > self.p * sums_NE[:, -1:]
        after_NE = crossed_NE.roll(1, -1)
        after_NE[:, 0] = False
        return probs_NE.masked_fill(after_NE.scatter(-1, experts_NE, after_NE), -torch.inf)

    def loss(self, routing: Routing) -> Tensor:
        """Return one layer's mean entropy times the coefficient, a scalar."""
        log_NE = log_scores(routing.logits_NE, routing.gating).log_softmax(-1)  # finite where p is 0
        return self.coef * -(log_NE.exp() * log_NE).sum(-1).mean()
