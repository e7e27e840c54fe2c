"""Temperature: how sharply a layer's router tells its experts apart, as a number for each layer.

Shapes: N tokens, L MoE layers, E experts, D model width.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from simbal.balancing.base import Balancing, Properties
from simbal.errors import UserError
from simbal.model.router import Router, product


class Temperature(Balancing):
    """logits = x W^T / T_l in MoE layer l: below 1 sharpens the weights, above 1 evens them; the choice is the same."""

    formula = "no loss; logits = x W^T / T, T of the layer"
    citation = "control"
    properties = Properties(differentiable=False, scope="token", causal=True, revives_dead_experts=False)

    def __init__(self, temperature: float | list[float] = 0.5) -> None:
        """Set T, one number for all layers or a list of one for each."""
        super().__init__()
        self.temperature = temperature if isinstance(temperature, list) else [temperature]
        self.of_each_layer = isinstance(temperature, list)
        if not all(0 < each < math.inf for each in self.temperature):
            raise UserError(f"temperature={temperature} must be a finite number above 0, or a list of such")

    def prepare(self, routers: Sequence[Router]) -> None:
        """Check that every layer has its number; `UserError` if not."""
        if self.of_each_layer and len(self.temperature) != len(routers):
            raise UserError(
                f"temperature={self.temperature} has {len(self.temperature)} numbers for {len(routers)} layers: give "
                "one for each, or one for all"
            )

    def logits(self, x_ND: Tensor, weight_ED: Tensor, layer: int) -> Tensor:
        """Return the logits over the layer's temperature, (N, E)."""
        return product(x_ND, weight_ED, layer) / self.temperature[layer if self.of_each_layer else 0]
