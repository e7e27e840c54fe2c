"""Any set of strategies at once: their losses and their biases add.

Shapes: L MoE layers, E experts.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing
from simbal.model.router import Routing


class Composition(nn.Module):
    """`parts` maps each strategy's name to the strategy."""

    def __init__(self, parts: Mapping[str, Balancing]) -> None:
        super().__init__()
        self.strategies = nn.ModuleDict(parts)

    @property
    def parts(self) -> dict[str, Balancing]:
        """The strategies by name."""
        return {name: cast(Balancing, part) for name, part in self.strategies.items()}

    @property
    def router_init(self) -> str:
        """What the parts prefer: orthogonal if any of them does."""
        return "orthogonal" if "orthogonal" in {part.router_init for part in self.parts.values()} else "normal"

    def losses(self, routings: list[Routing]) -> dict[str, Tensor]:
        """Each strategy's loss in each layer, (L,); a dense model has no layer, hence no loss."""
        if not routings:
            return {}
        return {name: torch.stack([part.loss(routing) for routing in routings]) for name, part in self.parts.items()}

    def expert_bias(self) -> Tensor | None:
        """Sum of the parts' biases (L, E), or None if no part has one."""
        biases = [bias for part in self.parts.values() if (bias := part.expert_bias()) is not None]
        return sum(biases[1:], biases[0]) if biases else None

    def update(self, tokens_per_expert_LE: Tensor) -> None:
        """Hand the counts of a finished optimizer step to every part."""
        for part in self.parts.values():
            part.update(tokens_per_expert_LE)
