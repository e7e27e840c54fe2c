"""The interface of a balancing strategy: the properties that it declares, and the hooks that it overrides.

A run calls the hooks in this order: `prepare` once; `logits`, `adjust_logits` and `choice_scores` in each forward pass,
then `measure` and `losses`; and `update` after each optimizer step.
Shapes: B sequences, S sequence length, N = B*S tokens, L MoE layers, E experts, D model width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn

from simbal.errors import UserError
from simbal.model.router import Router, Routing, Steering, device_only


@dataclass(frozen=True)
class Properties:
    """The promises of a strategy; the conformance suite holds it to each of these, true or false.

    `scope` is what the strategy looks at together. Only `micro` depends on how a batch is cut into micro-batches and
    ranks; `global` is the whole optimizer step.
    """

    differentiable: bool  # the loss has a gradient; otherwise it is 0
    scope: Literal["weights", "token", "sequence", "micro", "global"]
    causal: bool  # in training, a later token cannot change an earlier token's experts
    revives_dead_experts: bool  # draws tokens to an expert that gets none
    equivariant: bool = True  # relabelling the experts relabels the choice and changes nothing else
    mixes_layers: bool = False  # the loss is no sum of one term for each layer


@dataclass(frozen=True)
class FinishedStep:
    """An optimizer step as a strategy sees it afterwards, over all its micro-batches and ranks."""

    measured_LE: Tensor  # the sum of what `measure` returned, of its shape
    num_measured: int  # how often: micro-batches times ranks
    router_weights: Sequence[Tensor]  # (E, D) of each layer, as the optimizer has left them
    lr: float
    factor: float  # of the strategy's schedule in this step


class Balancing(nn.Module, Steering):
    """The base class, which does nothing; a strategy declares what it is and overrides the hooks that it needs.

    How it changes a router's decisions is what it overrides of `Steering`.

    State that must survive a restart is a registered buffer; it keeps its dtype under every cast.
    """

    formula: str
    citation: str
    properties: Properties
    coef: float = 0.0  # multiplier of the loss
    unit: str = "the formula in one layer"  # what the effective coefficient multiplies
    over_layers: str | None = None  # sum | mean; None: as optim.aux_layer_reduce says
    router_init: str = "normal"  # the start that router.init=auto takes
    gatings: tuple[str, ...] = ("softmax", "sigmoid")  # under which it can choose experts
    sets_router_weight: bool = False  # beside the optimizer; only one strategy of a set can
    needs_lr: bool = False  # `update` looks at the learning rate
    needs_experts: bool = False  # the loss is one of the experts' weights, `Routing.experts`

    def __init__(self) -> None:  # without arguments: nn.Module's takes any, and no wrong key would be refused
        super().__init__()

    def prepare(self, routers: Sequence[Router]) -> None:
        """Look at every layer's router once, at its initial weight, before the optimizer exists.

        Raises:
            UserError: the strategy cannot work on such routers.
        """

    def loss(self, routing: Routing) -> Tensor:
        """Return one layer's auxiliary loss, coefficient included; a scalar."""
        return routing.router_weight_ED.new_zeros(())

    def losses(self, routings: Sequence[Routing], step_counts_LE: Tensor | None) -> Tensor:
        """Return every layer's loss, (L,).

        Args:
            routings: of each layer.
            step_counts_LE: what `measure` sums to over the whole step; None unless `needs_step_counts`.
        """
        return torch.stack([self.loss(routing) for routing in routings])

    @property
    def needs_step_counts(self) -> bool:
        """Whether the loss needs the whole step's `measure`.

        Several micro-batches then take two passes, of which the first only counts.
        """
        return False

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return what is summed over the step's micro-batches and ranks, (L, ...); here the tokens of each expert."""
        return torch.stack([routing.tokens_per_expert_E for routing in routings])

    def update(self, step: FinishedStep) -> None:
        """Move the strategy's state after an optimizer step, in training only."""

    def effective_coef(self, num_layers: int, top_k: int) -> float:
        """Return the multiplier of `unit` in the objective, with `num_layers` layers summed (1 if averaged)."""
        return self.coef * num_layers

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(device_only(fn), recurse)  # type: ignore[no-untyped-call]
        return self


class WeightLoss(Balancing):
    """A strategy whose loss is a function of the router's weight alone, for a model of whatever kind."""

    properties = Properties(differentiable=True, scope="weights", causal=True, revives_dead_experts=False)

    def loss(self, routing: Routing) -> Tensor:
        """Return the loss of the layer's router; a scalar."""
        return self.of_weight(routing.router_weight_ED)

    def of_weight(self, weight_ED: Tensor) -> Tensor:
        """Return the loss of a router's weight, one row for each expert; a scalar."""
        raise NotImplementedError


def require_unchosen(routers: Sequence[Router]) -> None:
    """Raise `UserError` if a router chooses every expert, so that there is no choice to balance."""
    if any(router.top_k == len(router.weight_ED) for router in routers):
        raise UserError("model.top_k equals model.num_experts: every expert is always chosen, nothing to balance")
