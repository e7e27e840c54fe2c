"""Capacity: an expert that has its fill leaves out the rest of its tokens, in the order of Switch Transformers.

Reference: arXiv 2101.03961, as in flaxformer's routers that let tokens choose.
Shapes: N tokens, E experts, K experts per token, R = N*K choices.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from simbal.balancing.base import Balancing, Properties
from simbal.config.values import not_negative
from simbal.errors import UserError
from simbal.model.router import Candidates, Router, largest


class Capacity(Balancing):
    """In training an expert takes at most C = ceil(capacity_factor N K / E) of a micro-batch's N tokens.

    The first choices of all tokens queue up for their experts, in the order of the tokens, and behind them all second
    choices, and so on; whoever stands behind place C is dropped. The weights of the experts that are left stay what
    they were. With K > 1 a first choice comes before a second one of an earlier token: not causal. In evaluation
    nothing is dropped, and the choice is that of a plain router.
    """

    citation = "arXiv 2101.03961"
    properties = Properties(differentiable=False, scope="micro", causal=False, revives_dead_experts=False)
    drops = True

    def __init__(self, capacity_factor: float = 1.25) -> None:
        super().__init__()
        self.capacity_factor = checked_factor(capacity_factor)
        self.formula = (
            f"no loss; in training an expert takes at most ceil({capacity_factor:g} NK/E) tokens of a micro-batch, all "
            "first choices before all second ones; weights as without drops"
        )

    @property
    def ragged(self) -> bool:
        """Whether experts may be dropped: in training."""
        return self.training

    def prepare(self, routers: Sequence[Router]) -> None:
        """Declare the choice causal where each token has one expert."""
        if all(router.top_k == 1 for router in routers):
            self.properties = replace(self.properties, causal=True)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the logits, (N, E), in training with -inf where an expert is not chosen or has dropped the token."""
        logits_NE = candidates.logits_NE
        if not self.training:
            return logits_NE
        experts_NK = largest(logits_NE, candidates.top_k)
        most = math.ceil(even_load(logits_NE, candidates.top_k, self.capacity_factor))
        kept_NK = places(experts_NK) < most
        kept_NE = torch.zeros_like(logits_NE, dtype=torch.bool).scatter(1, experts_NK, kept_NK)
        return logits_NE.masked_fill(~kept_NE, -torch.inf)


def places(experts_NK: Tensor) -> Tensor:
    """Return how many choices stand before each in the queue of its expert, (N, K)."""
    queue_R = experts_NK.T.reshape(-1)  # all first choices, then all second ones
    sorted_R, order_R = queue_R.sort(stable=True)
    first_R = torch.searchsorted(sorted_R, sorted_R)  # where the row's expert begins
    places_R = torch.empty_like(order_R)
    places_R[order_R] = torch.arange(len(order_R), device=order_R.device) - first_R
    return places_R.view(experts_NK.shape[1], -1).T


def even_load(scores_NE: Tensor, top_k: int, capacity_factor: float) -> Fraction:
    """Return capacity_factor N K / E exactly, with the factor as it is written: 1.1 times 10 is not above 11."""
    num_tokens, num_experts = scores_NE.shape
    return Fraction(str(capacity_factor)) * num_tokens * top_k / num_experts


def checked_factor(value: Any) -> float:
    """Return a capacity factor; `UserError` unless it is a finite number above 0."""
    if not not_negative("capacity_factor", value):
        raise UserError(f"capacity_factor={value} must be above 0")
    return float(value)
