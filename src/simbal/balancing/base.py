"""What a balancing strategy is.

Shapes: B sequences, S sequence length, N = B*S tokens, L MoE layers, E experts, D model width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn

from simbal.model.router import Candidates, Router, Routing, device_only


@dataclass(frozen=True)
class Properties:
    """What a strategy promises; the conformance suite holds it to each of these, true or false.

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

    measured_LE: Tensor  # the sum of what `measure` returned
    num_measured: int  # how often: micro-batches times ranks
    router_weights: Sequence[Tensor]  # (E, D) of each layer, as the optimizer has left them
    lr: float
    factor: float  # of the strategy's schedule in this step


class Balancing(nn.Module):
    """Does nothing; a strategy says what it is and overrides what it needs.

    State that must survive a restart is a registered buffer; it keeps its dtype under every cast.
    """

    formula: str
    citation: str
    properties: Properties
    coef: float = 0.0  # multiplier of the loss
    unit: str = "the formula in one layer"  # what the effective coefficient multiplies
    over_layers: str | None = None  # sum | mean; None: as optim.aux_layer_reduce says
    router_init: str = "normal"  # the start that router.init=auto takes
    needs_lr: bool = False  # `update` looks at the learning rate

    def __init__(self) -> None:
        super().__init__()

    def prepare(self, routers: Sequence[Router]) -> None:
        """Called once with every layer's router at its initial weight, before the optimizer exists.

        Raises:
            UserError: the strategy cannot work on such routers.
        """

    def adjust_logits(self, logits_NE: Tensor) -> Tensor:
        """What goes into the gating."""
        return logits_NE

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """(N, E): each token goes to the K experts with its largest scores, which get no gradient."""
        return candidates.logits_NE

    def loss(self, routing: Routing) -> Tensor:
        """One layer's auxiliary loss, coefficient included; a scalar."""
        return routing.router_weight_ED.new_zeros(())

    def losses(self, routings: Sequence[Routing], step_counts_LE: Tensor | None) -> Tensor:
        """(L,), every layer's loss.

        Args:
            routings: of each layer.
            step_counts_LE: what `measure` sums to over the whole step; None unless `needs_step_counts`.
        """
        return torch.stack([self.loss(routing) for routing in routings])

    @property
    def needs_step_counts(self) -> bool:
        """The loss needs the whole step's `measure`: several micro-batches take two passes, the first only counts."""
        return False

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """(L, E), summed over the step's micro-batches and ranks."""
        return torch.stack([routing.tokens_per_expert_E for routing in routings])

    def update(self, step: FinishedStep) -> None:
        """Called once after each optimizer step, in training only."""

    def effective_coef(self, num_layers: int, top_k: int) -> float:
        """What `unit` is multiplied by in the objective, with `num_layers` layers summed (1 if averaged)."""
        return self.coef * num_layers

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(device_only(fn), recurse)  # type: ignore[no-untyped-call]
        return self
