"""Strategies that cannot be attached to a model that is there already."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from simbal.attach.forward_pass import ForwardPass
from simbal.attach.routers import HostRouter
from simbal.balancing.base import Balancing
from simbal.balancing.orthogonal import OrthogonalInit, OrthogonalParametrization
from simbal.errors import UserError
from simbal.model.router import Routing

REASONS: dict[type[Balancing], str] = {
    OrthogonalInit: "it is only a start: call torch.nn.init.orthogonal_ on the weight of each router instead",
    OrthogonalParametrization: (
        "it replaces the router's weight by a parametrization, which would change the model's parameters and state_dict"
    ),
}


def named(strategies: Balancing | Iterable[Balancing] | Mapping[str, Balancing]) -> dict[str, Balancing]:
    """Strategies by name; those without one are called like their class.

    Raises:
        UserError: something is no strategy, or two have the same name.
    """
    if isinstance(strategies, Mapping):
        parts = dict(strategies)
    else:
        given = [strategies] if isinstance(strategies, Balancing | type) else list(strategies)
        parts = {type(strategy).__name__: strategy for strategy in given}
        if len(parts) < len(given):
            raise UserError("several strategies of one class need names: attach(model, {name: strategy, ...})")
    for name, strategy in parts.items():
        if not isinstance(strategy, Balancing):
            raise UserError(f"{name}: {strategy!r} is no instance of simbal.balancing.Balancing")
    return parts


def refuse(parts: Mapping[str, Balancing], routers: Sequence[HostRouter]) -> None:
    """UserError for a strategy that would do nothing, or more than a hook can take back."""
    frozen = not any(router.weight_ED.requires_grad for router in routers)
    for name, part in parts.items():
        for refused, reason in REASONS.items():
            if isinstance(part, refused):
                raise UserError(f"{name} cannot be attached: {reason}")
        if frozen and part.properties.scope == "weights" and part.coef:
            raise UserError(f"{name} acts on the router weights, and all of them are frozen: set their requires_grad")


def refuse_pass(name: str, part: Balancing, last: ForwardPass, routings: list[Routing]) -> None:
    """UserError if a loss would be wrong, or silently without the gradient that it promises."""
    if not part.properties.differentiable or part.properties.scope == "weights":
        return
    if part.properties.scope == "sequence" and last.kept_N is not None:
        raise UserError(f"{name} takes each sequence by itself, and this batch has padding: use scope=micro")
    lost = any(r.router_weight_ED.requires_grad and not r.logits_NE.requires_grad for r in routings)
    if last.with_gradient and torch.is_grad_enabled() and lost:
        raise UserError(
            f"{name} needs the gradient of the router's logits, and gradient checkpointing has dropped it: "
            "enable it with {'use_reentrant': False}"
        )
