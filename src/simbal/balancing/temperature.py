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

    def __init__(self, temperature: float = 0.5, of_layers: list[float] | None = None) -> None:
        """Set T of every layer, or in its place `of_layers`, one for each MoE layer."""
        super().__init__()
        self.temperature, self.of_layers = temperature, of_layers
        for key, value in {"temperature": [temperature], "of_layers": of_layers or []}.items():
            if not all(0 < each < math.inf for each in value):
                raise UserError(f"{key}={getattr(self, key)} must be above 0 and finite")

    def prepare(self, routers: Sequence[Router]) -> None:
        """Check that every layer has its number; `UserError` if not."""
        if self.of_layers is not None and len(self.of_layers) != len(routers):
            raise UserError(
                f"of_layers={self.of_layers} has {len(self.of_layers)} temperatures for {len(routers)} layers: "
                "give one for each, or null"
            )

    def logits(self, x_ND: Tensor, weight_ED: Tensor, layer: int) -> Tensor:
        """Return the logits over the layer's temperature, (N, E)."""
        of_layer = self.temperature if self.of_layers is None else self.of_layers[layer]
        return product(x_ND, weight_ED, layer) / of_layer
