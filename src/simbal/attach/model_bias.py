"""LossFree on a bias that the model itself has: DeepSeek-V3's `e_score_correction_bias` and its like.

The model's own code adds it to the scores by which experts are chosen, and trains it nowhere.
Shapes: L MoE layers, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from simbal.balancing.bias import LossFree
from simbal.balancing.composition import Composition
from simbal.errors import UserError
from simbal.host.routers import HostRouter


@dataclass(frozen=True)
class ModelBias:
    """The biases of a model's routers, which `strategy` moves in place; the truth is always in the model."""

    strategy: LossFree
    routers: Sequence[HostRouter]

    @torch.no_grad()
    def read(self) -> None:
        """Set the strategy's bias, (L, E), to that of the model."""
        self.strategy.bias_LE = torch.stack([_bias_E(router).to(self.strategy.bias_LE) for router in self.routers])

    @torch.no_grad()
    def write(self) -> None:
        """Set the model's biases to that of the strategy."""
        for router, bias_E in zip(self.routers, self.strategy.bias_LE, strict=True):
            _bias_E(router).copy_(bias_E)


def _bias_E(router: HostRouter) -> Tensor:
    assert router.bias_E is not None
    return router.bias_E


def take_over(composition: Composition, routers: Sequence[HostRouter], model: str) -> ModelBias | None:
    """Leave the choice of experts to the model's own code, where `composition` has a `LossFree` for its bias.

    Args:
        composition: of the strategies; if its chooser is that `LossFree`, it chooses no more.
        routers: of the model.
        model: the name of its class.

    Returns:
        The biases; None if nothing chooses experts, or a strategy can choose them in the routers' place.

    Raises:
        UserError: a strategy cannot steer routers of this rule, or would move a bias as it is not used.
    """
    rule, name = routers[0].rule, composition.chooser
    if rule.draws_in_training and composition.steers:
        raise UserError(
            f"{name or composition.adjuster} changes what routers decide, and those of {model} draw their experts at "
            "random in training, by a rule of their own; losses can be attached"
        )
    if name is None or rule.plain:
        return None
    strategy = composition.parts[name]
    if not (rule.biased and isinstance(strategy, LossFree)):
        other = "; LossFree(bias_on='scores') can move their own bias" if rule.biased else ""
        raise UserError(
            f"{name} chooses experts itself, and the routers of {model} choose by a rule of their own: {rule}{other}"
        )
    if strategy.bias_on != "scores":
        raise UserError(f"{name}: {model} adds its bias to the scores after the gating: set bias_on='scores'")
    for router in routers:
        _refuse_narrow(name, strategy, router)
    composition.chooser = None
    taken = ModelBias(strategy, routers)
    taken.read()
    return taken


def _refuse_narrow(name: str, strategy: LossFree, router: HostRouter) -> None:
    """Raise `UserError` where small steps of the bias would be lost to rounding."""
    assert router.bias_at is not None
    owner, bias = type(router.bias_at[0]).__name__, router.bias_at[1]
    if strategy.bias_LE.dtype != torch.float32:
        raise UserError(f"{name}: bias_dtype must be fp32 where the bias is the model's own {bias}")
    if torch.finfo(_bias_E(router).dtype).bits < 32:
        raise UserError(
            f"{name}: the {bias} of {router.name} is in {_bias_E(router).dtype}, in which small steps are lost: keep "
            f"it in fp32, by m.{bias}.data = m.{bias}.data.float() for each module m of class {owner}"
        )
