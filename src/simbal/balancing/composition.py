"""Composition of strategies: the sum of their auxiliary losses, and at most one strategy that chooses experts.

`build_balancing` creates it from the `balancing` group of a config.
Shapes: B sequences, S sequence length, N = B*S tokens, L MoE layers, E experts.
"""

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing, FinishedStep
from simbal.config.schedule import Schedule
from simbal.config.signatures import check_arguments
from simbal.config.values import check_choice
from simbal.errors import UserError
from simbal.model.router import Candidates, Router, Routing, linear_logits

ENTRY_POINT_GROUP = "simbal.strategies"  # entries: NAME = "module:Class"


class Composition(nn.Module):
    """A set of strategies. Losses add up, each with its own schedule; at most one strategy chooses experts.

    `parts` holds the strategies by name. `chooser`, `mapper` and `adjuster` are the names of the strategies that
    override `choice_scores`, `logits` and `adjust_logits`, or None.
    """

    def __init__(
        self, parts: Mapping[str, Balancing], schedules: Mapping[str, Schedule], layer_reduce: str = "sum"
    ) -> None:
        """Combine strategies.

        Args:
            parts: strategies by name.
            schedules: schedules of the coefficients by strategy name; the default is a constant 1.
            layer_reduce: sum or mean, the reduction over layers unless the strategy sets `over_layers`.

        Raises:
            UserError: two strategies choose experts, map hidden states to logits, adjust logits or set the router's
                weight; or `layer_reduce` is unknown.
        """
        super().__init__()
        self.parts, self.strategies = dict(parts), nn.ModuleDict(parts)  # registers their state
        self.schedules, self.layer_reduce = dict(schedules), check_choice("layer_reduce", layer_reduce, ("sum", "mean"))
        self.chooser = _at_most_one("choose a token's experts", self._overriding("choice_scores"))
        self.mapper = _at_most_one("map hidden states to logits", self._overriding("logits"))
        self.adjuster = _at_most_one("adjust the router's logits", self._overriding("adjust_logits"))
        _at_most_one("set the router's weight", [name for name, part in parts.items() if part.sets_router_weight])

    def _overriding(self, method: str) -> list[str]:
        """Return the names of the strategies that override `method`."""
        return [n for n, part in self.parts.items() if getattr(type(part), method) is not getattr(Balancing, method)]

    @property
    def steers(self) -> bool:
        """Whether any strategy changes the router's decisions."""
        return any(name is not None for name in (self.chooser, self.mapper, self.adjuster))

    @property
    def ragged(self) -> bool:
        """Whether the number of experts per token varies."""
        return self.chooser is not None and self.parts[self.chooser].ragged

    @property
    def drops(self) -> bool:
        """Whether some of the K chosen experts are dropped while the others keep their weights."""
        return self.chooser is not None and self.parts[self.chooser].drops

    @property
    def router_init(self) -> str:
        """The initialization used by router.init=auto: orthogonal if any strategy prefers it, else normal."""
        return "orthogonal" if "orthogonal" in {part.router_init for part in self.parts.values()} else "normal"

    @property
    def needs_step_counts(self) -> bool:
        """Whether any loss needs measurements summed over the full step."""
        return any(part.needs_step_counts for part in self.parts.values())

    def prepare(self, routers: Sequence[Router]) -> None:
        """Prepare every strategy for the routers, once, before training.

        Raises:
            UserError: a strategy does not support these routers, or is a loss on frozen weights.
        """
        for part in self.parts.values():
            part.prepare(routers)
        chooser = Balancing if self.chooser is None else self.parts[self.chooser]
        if "relu" not in chooser.gatings and any(router.gating == "relu" for router in routers):
            raise UserError(
                "router=relu gives experts with logits of at most 0 the weight 0, and only balancing=remoe removes "
                "them from the choice: add balancing=remoe or use router=softmax"
            )
        frozen = bool(routers) and not any(p.requires_grad for router in routers for p in router.parameters())
        for name, part in self.parts.items():
            of_router = part.properties.scope == "weights" and not part.needs_experts
            if frozen and part.properties.differentiable and of_router:
                raise UserError(f"balancing: {name} is a loss on the router's weight, but the weight is frozen")

    def logits(self, x_ND: Tensor, weight_ED: Tensor, layer: int) -> Tensor:
        """Return the mapper's logits, (N, E); x W^T without a mapper."""
        map_to_logits = linear_logits if self.mapper is None else self.parts[self.mapper].logits
        return map_to_logits(x_ND, weight_ED, layer)

    def adjust_logits(self, logits_NE: Tensor) -> Tensor:
        """Return the logits, (N, E), after the adjuster; unchanged without an adjuster."""
        return logits_NE if self.adjuster is None else self.parts[self.adjuster].adjust_logits(logits_NE)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the chooser's scores, (N, E); the logits without a chooser."""
        return candidates.logits_NE if self.chooser is None else self.parts[self.chooser].choice_scores(candidates)

    def layer_reduction(self, name: str) -> str:
        """Return the reduction over layers of strategy `name`: sum or mean."""
        return self.parts[name].over_layers or self.layer_reduce

    def losses(
        self, routings: Sequence[Routing], step: int = 0, step_counts: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return the loss term of each differentiable strategy, a scalar; empty for a dense model.

        Args:
            routings: one per layer.
            step: number of the optimizer step, for the schedules.
            step_counts: measurements summed over the full step, (L, ...), of the strategies that need them.
        """
        terms = {}
        for name, part in self.parts.items() if routings else ():
            if part.properties.differentiable:
                loss_L = part.losses(routings, step_counts[name] if step_counts and part.needs_step_counts else None)
                reduced = loss_L.sum() if self.layer_reduction(name) == "sum" else loss_L.mean()
                terms[name] = self.schedule(name).factor(step) * reduced
        return terms

    def schedule(self, name: str) -> Schedule:
        """Return the schedule of strategy `name`; the default is a constant 1."""
        return self.schedules.get(name, Schedule())

    @torch.no_grad()
    def measure(self, routings: Sequence[Routing]) -> dict[str, Tensor]:
        """Return each strategy's measurement, (L, ...), to sum over the step; empty for a dense model."""
        return {name: part.measure(routings) for name, part in self.parts.items()} if routings else {}

    @torch.no_grad()
    def update(
        self,
        measured: Mapping[str, Tensor],
        num_measured: int,
        router_weights: Sequence[Tensor],
        lr: float,
        step: int,
    ) -> None:
        """Update every strategy after optimizer step `step`, with its summed measurements."""
        for name, measured_LE in measured.items():
            factor = self.schedule(name).factor(step)
            self.parts[name].update(FinishedStep(measured_LE, num_measured, router_weights, lr, factor))


def _at_most_one(action: str, names: Sequence[str]) -> str | None:
    """Return the only name, or None if `names` is empty; `UserError` for several names."""
    if len(names) > 1:
        raise UserError(f"balancing: {' and '.join(names)} both {action}; at most one strategy can")
    return names[0] if names else None


def build_balancing(
    group: Mapping[str, Mapping[str, Any]],
    facts: Mapping[str, int],
    max_steps: int,
    layer_reduce: str,
    trusted: bool = True,
) -> Composition:
    """Return the composition of all strategies of a config group.

    Args:
        group: by strategy name, its `_target_`, constructor arguments and optional `schedule`.
        facts: num_layers, num_experts and seed, passed to constructors that have these parameters.
        max_steps: number of steps of the run; schedules must end by then.
        layer_reduce: sum or mean, the reduction over layers unless the strategy sets `over_layers`.
        trusted: True for the user's own config, which may name any class; False for the config of a run folder.

    Raises:
        UserError: the config has a class that is not allowed, an unknown key, an invalid value or incompatible
            strategies.
    """
    parts = {name: build_strategy(name, keys, facts, trusted) for name, keys in group.items()}
    schedules = {
        name: Schedule.parse(f"balancing.{name}.schedule", keys.get("schedule"), max_steps)
        for name, keys in group.items()
    }
    return Composition(parts, schedules, layer_reduce)


def build_strategy(name: str, keys: Mapping[str, Any], facts: Mapping[str, int], trusted: bool = True) -> Balancing:
    """Return an instance of `keys["_target_"]`, created with the other keys except `schedule` and with `facts`.

    Raises:
        UserError: see `build_balancing`.
    """
    strategy = import_strategy(name, keys.get("_target_"), trusted)
    arguments = {key: value for key, value in keys.items() if key not in ("_target_", "schedule")}
    check_arguments(f"balancing.{name}.", strategy, arguments, given=facts)
    requested = {fact: facts[fact] for fact in facts.keys() & inspect.signature(strategy).parameters.keys()}
    try:
        return strategy(**arguments, **requested)
    except UserError as error:
        raise UserError(f"balancing.{name}.{error}") from None


def import_strategy(name: str, target: object, trusted: bool = True) -> type[Balancing]:
    """Return the strategy class with the dotted path `target`.

    Importing a module executes it, and run folders may come from other people. So without `trusted`, the class must be
    part of simbal or an entry point of `ENTRY_POINT_GROUP` in an installed package.

    Raises:
        UserError: the class is not allowed, does not exist, or is not a strategy.
    """
    module, _, attribute = str(target).rpartition(".")
    registered = {point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    if not (trusted or module.startswith("simbal.") or f"{module}:{attribute}" in registered):
        raise UserError(
            f"balancing.{name}: _target_={target} is not allowed in the config.yaml of a run: use a simbal strategy "
            f"or an entry point of the group {ENTRY_POINT_GROUP} in an installed package"
        )
    reason = ""
    try:
        imported = getattr(import_module(module), attribute, None)
    except (ImportError, TypeError, ValueError) as error:  # TypeError and ValueError: `module` is no absolute path
        imported, reason = None, f": {error}"
    if not inspect.isclass(imported) or not issubclass(imported, Balancing):
        raise UserError(
            f"balancing.{name}: _target_={target} is not a subclass of simbal.balancing.base.Balancing{reason}"
        )
    return imported
