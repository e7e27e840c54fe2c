"""What a balancing strategy is.

Shapes: L MoE layers, E experts, D model width.
"""

import math
from typing import ClassVar

from torch import Tensor, nn

from simbal.errors import UserError
from simbal.model.router import Routing


class Balancing(nn.Module):
    """Does nothing; a strategy overrides what it needs and says in class variables what it is.

    State that must survive a restart is a registered buffer.
    """

    formula: ClassVar[str]
    citation: ClassVar[str]
    data_free: ClassVar[bool] = False  # the loss is a function of the weights alone
    router_init: ClassVar[str] = "normal"  # the start that `router.init=auto` takes

    def loss(self, routing: Routing) -> Tensor:
        """One layer's auxiliary loss, coefficient included; a scalar."""
        return routing.router_weight_ED.new_zeros(())

    def expert_bias(self) -> Tensor | None:
        """(L, E), added for the choice of experts only."""
        return None

    def update(self, tokens_per_expert_LE: Tensor) -> None:
        """Called once after each optimizer step with its counts, summed over micro-batches and ranks."""


def checked_coef(strategy: str, coef: float) -> float:
    """`coef` as a float; `UserError` unless it is a finite number of at least 0."""
    number = isinstance(coef, int | float) and not isinstance(coef, bool)
    if not number or not math.isfinite(coef) or coef < 0:
        raise UserError(f"balancing.{strategy}.coef={coef} must be a finite number of at least 0")
    return float(coef)
