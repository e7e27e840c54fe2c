"""The interface of a balancing strategy: declared properties and hooks to override.

Training calls `prepare` once; in each forward pass `logits`, `adjust_logits` and `choice_scores`, then `measure` and
`losses`; and `update` after each optimizer step.
Shapes: B sequences, S sequence length, N = B*S tokens, L MoE layers, E experts, D model width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn

from simbal.errors import UserError
from simbal.model.router import Router, Routing, Steering, without_dtype_change

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # options of strategies


@dataclass(frozen=True)
class Properties:
    """Declared properties of a strategy. The conformance suite checks every property, True or False.

    `scope` is the unit over which the strategy computes statistics. Only `micro` depends on how a batch is split into
    micro-batches and ranks; `global` is the full optimizer step.
    """

    differentiable: bool  # the loss has a gradient; if False, the loss is 0
    scope: Literal["weights", "token", "sequence", "micro", "global"]
    causal: bool  # in training, later tokens never change the experts of earlier tokens
    revives_dead_experts: bool  # an expert without tokens gets tokens again
    equivariant: bool = True  # permuting the experts permutes the choice and changes nothing else
    mixes_layers: bool = False  # the loss is not a sum of one term per layer


@dataclass(frozen=True)
class FinishedStep:
    """A finished optimizer step, summed over micro-batches and ranks: the argument of `update`."""

    measured_LE: Tensor  # sum of the results of `measure`
    num_measured: int  # number of `measure` calls: micro-batches times ranks
    router_weights: Sequence[Tensor]  # (E, D) per layer, after the optimizer's step
    lr: float
    factor: float  # value of the strategy's schedule at this step


class Balancing(nn.Module, Steering):
    """Base class of strategies, with hooks that do nothing. A strategy declares its properties and overrides hooks.

    Overriding the methods of `Steering` changes the router's decisions. State that checkpoints must contain is a
    registered buffer; casting the model does not change the dtype of these buffers.
    """

    formula: str
    citation: str
    properties: Properties
    coef: float = 0.0  # multiplier of the loss
    unit: str = "the formula in one layer"  # the quantity that the effective coefficient multiplies
    over_layers: str | None = None  # sum | mean; None: optim.aux_layer_reduce
    router_init: str = "normal"  # initialization used by router.init=auto
    gatings: tuple[str, ...] = ("softmax", "sigmoid", "sqrtsoftplus")  # that a strategy that chooses experts supports
    sets_router_weight: bool = False  # sets W outside of the optimizer; at most one strategy can
    needs_lr: bool = False  # `update` uses the learning rate
    needs_experts: bool = False  # the loss depends on the experts' weights, `Routing.experts`

    def __init__(self) -> None:  # no arguments: nn.Module accepts any and would hide misspelled keys
        super().__init__()

    def prepare(self, routers: Sequence[Router]) -> None:
        """Set up the strategy for the routers of all layers. Called once, before the optimizer is created.

        Raises:
            UserError: the strategy does not support these routers.
        """

    def loss(self, routing: Routing) -> Tensor:
        """Return one layer's auxiliary loss times the coefficient, a scalar."""
        return routing.router_weight_ED.new_zeros(())

    def losses(self, routings: Sequence[Routing], step_counts_LE: Tensor | None) -> Tensor:
        """Return every layer's loss, (L,).

        Args:
            routings: one per layer.
            step_counts_LE: `measure` summed over the full step; None unless `needs_step_counts`.
        """
        return torch.stack([self.loss(routing) for routing in routings])

    @property
    def needs_step_counts(self) -> bool:
        """Whether the loss needs `measure` summed over the full step.

        Each of several micro-batches then takes two forward passes; the first one only counts.
        """
        return False

    def measure(self, routings: Sequence[Routing]) -> Tensor:
        """Return the quantity to sum over micro-batches and ranks, (L, ...); by default the tokens per expert."""
        return torch.stack([routing.tokens_per_expert_E for routing in routings])

    def update(self, step: FinishedStep) -> None:
        """Update the strategy's state after an optimizer step, in training only."""

    def choosable(self, num_experts: int, top_k: int) -> int:
        """Return how many of the experts a token can choose from in evaluation."""
        return num_experts

    def effective_coef(self, num_layers: int, top_k: int) -> float:
        """Return the multiplier of `unit` in the objective; `num_layers` is 1 if losses are averaged over layers."""
        return self.coef * num_layers

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(without_dtype_change(fn), recurse)  # type: ignore[no-untyped-call]
        return self


class WeightLoss(Balancing):
    """A strategy whose loss depends only on the router's weight, for any model."""

    properties = Properties(differentiable=True, scope="weights", causal=True, revives_dead_experts=False)

    def loss(self, routing: Routing) -> Tensor:
        """Return the loss of the layer's router, a scalar."""
        return self.of_weight(routing.router_weight_ED)

    def of_weight(self, weight_ED: Tensor) -> Tensor:
        """Return the loss of a router's weight with one row per expert, a scalar."""
        raise NotImplementedError


def require_unused_experts(routers: Sequence[Router]) -> None:
    """Raise `UserError` if a router always chooses every expert, so that there is nothing to balance."""
    if any(router.top_k == len(router.weight_ED) for router in routers):
        raise UserError(
            "model.top_k equals model.num_experts: every expert is always chosen, so there is nothing to balance"
        )
