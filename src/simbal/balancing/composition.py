"""Composition of strategies: the sum of their losses, and at most one strategy per layer that chooses experts.

`build_balancing` creates it from the `balancing` group of a config.
Shapes: B sequences, S sequence length, N = B*S tokens, L MoE layers, E experts.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import entry_points
from itertools import combinations
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing, FinishedStep
from simbal.config.layers import COMMON_KEYS, selected_layers
from simbal.config.schedule import Schedule
from simbal.config.signatures import check_arguments
from simbal.config.values import check_choice
from simbal.errors import UserError
from simbal.model.router import Candidates, Router, Routing, Steering

ENTRY_POINT_GROUP = "simbal.strategies"  # entries: NAME = "module:Class"
INACTIVE = Balancing()  # changes nothing
T = TypeVar("T")


@dataclass(frozen=True)
class LayerSteering(Steering):
    """The strategies that change the router's decisions in one layer."""

    chooser: Balancing
    adjuster: Balancing

    @property
    def ragged(self) -> bool:
        """Whether the number of experts per token varies in the layer."""
        return self.chooser.ragged

    @property
    def drops(self) -> bool:
        """Whether chosen experts are dropped in the layer."""
        return self.chooser.drops

    def adjust_logits(self, logits_NE: Tensor) -> Tensor:
        """Return the layer's logits, (N, E), after the adjuster."""
        return self.adjuster.adjust_logits(logits_NE)


class Composition(nn.Module):
    """A set of strategies. Losses add up, each with its own schedule; at most one strategy per layer chooses experts.

    `parts` holds the strategies by name. `choosers`, `mappers` and `adjusters` are the names of the strategies that
    override `choice_scores`, `logits` and `adjust_logits`.

    A strategy with a selection in `layers` acts in these layers only. It gets their routers and routings in order, as
    if they were the whole model: its layer 0 is the first layer of its selection.
    """

    def __init__(
        self,
        parts: Mapping[str, Balancing],
        schedules: Mapping[str, Schedule],
        layer_reduce: str = "sum",
        layers: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Combine strategies.

        Args:
            parts: strategies by name.
            schedules: schedules of the coefficients by strategy name; the default is a constant 1.
            layer_reduce: sum or mean, the reduction over its layers unless the strategy sets `over_layers`.
            layers: layers by strategy name; the default is every layer.

        Raises:
            UserError: in one layer, two strategies choose experts, map hidden states to logits, adjust logits or set
                the router's weight; or `layer_reduce` is unknown.
        """
        super().__init__()
        self.parts, self.strategies = dict(parts), nn.ModuleDict(parts)  # registers their state
        self.schedules, self.layer_reduce = dict(schedules), check_choice("layer_reduce", layer_reduce, ("sum", "mean"))
        self.layers = dict(layers or {})
        self.choosers = self._one_per_layer("choose a token's experts", self._overriding("choice_scores"))
        self.mappers = self._one_per_layer("map hidden states to logits", self._overriding("logits"))
        self.adjusters = self._one_per_layer("adjust the router's logits", self._overriding("adjust_logits"))
        self._one_per_layer("set the router's weight", [n for n, part in parts.items() if part.sets_router_weight])

    def _overriding(self, method: str) -> list[str]:
        """Return the names of the strategies that override `method`."""
        inherited = getattr(Balancing, method)  # a strategy may override it in an instance
        return [
            n for n, part in self.parts.items() if getattr(getattr(part, method), "__func__", None) is not inherited
        ]

    def _one_per_layer(self, action: str, names: list[str]) -> list[str]:
        """Return `names`; `UserError` if two of these strategies act in the same layer."""
        for pair in combinations(names, 2):
            first, second = (self.layers.get(name) for name in pair)
            if first is None or second is None or {*first} & {*second}:
                raise UserError(
                    f"balancing: {' and '.join(pair)} both {action} in a layer: remove one of them, or give them "
                    "different layers with first=, after= or layers="
                )
        return names

    def _of(self, name: str, per_layer: Sequence[T]) -> Sequence[T]:
        """Return the elements of the strategy's layers."""
        return per_layer if name not in self.layers else [per_layer[layer] for layer in self.layers[name]]

    def _acting(self, names: Sequence[str], layer: int) -> tuple[Balancing, int]:
        """Return the strategy among `names` that acts in a layer, and the layer's number among its layers."""
        for name in names:
            layers = self.layers.get(name)
            if layers is None or layer in layers:
                return self.parts[name], layer if layers is None else layers.index(layer)
        return INACTIVE, layer

    @property
    def chooser(self) -> str | None:
        """The name of the first strategy that chooses experts, or None."""
        return next(iter(self.choosers), None)

    @property
    def mapper(self) -> str | None:
        """The name of the first strategy that maps hidden states to logits, or None."""
        return next(iter(self.mappers), None)

    @property
    def adjuster(self) -> str | None:
        """The name of the first strategy that adjusts logits, or None."""
        return next(iter(self.adjusters), None)

    @property
    def steers(self) -> bool:
        """Whether any strategy changes the router's decisions."""
        return bool(self.choosers or self.mappers or self.adjusters)

    @property
    def ragged(self) -> bool:
        """Whether the number of experts per token varies in any layer."""
        return any(self.parts[name].ragged for name in self.choosers)

    @property
    def drops(self) -> bool:
        """Whether in any layer some of the K chosen experts are dropped while the others keep their weights."""
        return any(self.parts[name].drops for name in self.choosers)

    def at(self, layer: int) -> LayerSteering:
        """Return the steering of one layer."""
        return LayerSteering(self._acting(self.choosers, layer)[0], self._acting(self.adjusters, layer)[0])

    def router_init(self, layer: int) -> str:
        """Return the initialization used by router.init=auto: orthogonal if a strategy of the layer prefers it."""
        acting = [part for name, part in self.parts.items() if layer in self.layers.get(name, (layer,))]
        return "orthogonal" if "orthogonal" in {part.router_init for part in acting} else "normal"

    @property
    def needs_step_counts(self) -> bool:
        """Whether any loss needs measurements summed over the full step."""
        return any(part.needs_step_counts for part in self.parts.values())

    def prepare(self, routers: Sequence[Router]) -> None:
        """Prepare every strategy for the routers, once, before training.

        Raises:
            UserError: a strategy does not support these routers, or is a loss on frozen weights.
        """
        for name, part in self.parts.items():
            part.prepare(self._of(name, routers))
        for layer, router in enumerate(routers):
            chooser, _ = self._acting(self.choosers, layer)
            if router.gating == "relu" and "relu" not in chooser.gatings:
                raise UserError(
                    "router=relu gives experts with logits of at most 0 the weight 0, and only balancing=remoe removes "
                    "them from the choice: add balancing=remoe or use router=softmax"
                )
            if router.gating not in chooser.gatings:
                names = ", ".join(chooser.gatings)
                raise UserError(f"router={router.gating} is not supported by {type(chooser).__name__}: use {names}")
        for name, part in self.parts.items() if routers else ():
            frozen = not any(p.requires_grad for router in self._of(name, routers) for p in router.parameters())
            of_router = part.properties.scope == "weights" and not part.needs_experts
            if frozen and part.properties.differentiable and of_router:
                raise UserError(f"balancing: {name} is a loss on the router's weight, but the weight is frozen")

    def logits(self, x_ND: Tensor, weight_ED: Tensor, layer: int) -> Tensor:
        """Return the logits, (N, E), of the layer's mapper; x W^T without a mapper."""
        mapper, number = self._acting(self.mappers, layer)
        return mapper.logits(x_ND, weight_ED, number)

    def adjust_logits(self, logits_NE: Tensor) -> Tensor:
        """Return the logits, (N, E), after the adjuster of layer 0; `at` returns the adjusters of other layers."""
        return self.at(0).adjust_logits(logits_NE)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the scores, (N, E), of the layer's chooser; the logits without a chooser."""
        chooser, number = self._acting(self.choosers, candidates.layer)
        return chooser.choice_scores(replace(candidates, layer=number))

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
                counts = step_counts[name] if step_counts and part.needs_step_counts else None
                loss_L = part.losses(self._of(name, routings), counts)
                reduced = loss_L.sum() if self.layer_reduction(name) == "sum" else loss_L.mean()
                terms[name] = self.schedule(name).factor(step) * reduced
        return terms

    def schedule(self, name: str) -> Schedule:
        """Return the schedule of strategy `name`; the default is a constant 1."""
        return self.schedules.get(name, Schedule())

    @torch.no_grad()
    def measure(self, routings: Sequence[Routing]) -> dict[str, Tensor]:
        """Return each strategy's measurement, (L, ...), to sum over the step; empty for a dense model.

        L counts the layers of the strategy.
        """
        return {name: part.measure(self._of(name, routings)) for name, part in self.parts.items()} if routings else {}

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
            weights = self._of(name, router_weights)
            self.parts[name].update(FinishedStep(measured_LE, num_measured, weights, lr, factor))


def build_balancing(
    group: Mapping[str, Mapping[str, Any]],
    facts: Mapping[str, Any],
    max_steps: int,
    layer_reduce: str,
    trusted: bool = True,
) -> Composition:
    """Return the composition of all strategies of a config group.

    Args:
        group: by strategy name, its `_target_`, constructor arguments, optional `schedule` and selection of layers.
        facts: num_layers, num_experts, vocab_size, seed, end_of_text and token_counts, passed to constructors that
            have these parameters.
        max_steps: number of steps of the run; schedules must end by then.
        layer_reduce: sum or mean, the reduction over layers unless the strategy sets `over_layers`.
        trusted: True for the user's own config, which may name any class; False for the config of a run folder.

    Raises:
        UserError: the config has a class that is not allowed, an unknown key, an invalid value or incompatible
            strategies.
    """
    selected = {name: selected_layers(f"balancing.{name}.", keys, facts["num_layers"]) for name, keys in group.items()}
    layers = {name: of_strategy for name, of_strategy in selected.items() if of_strategy is not None}
    parts = {
        name: build_strategy(
            name, keys, {**facts, "num_layers": len(layers.get(name, range(facts["num_layers"])))}, trusted
        )
        for name, keys in group.items()
    }
    schedules = {
        name: Schedule.parse(f"balancing.{name}.schedule", keys.get("schedule"), max_steps)
        for name, keys in group.items()
    }
    return Composition(parts, schedules, layer_reduce, layers)


def build_strategy(name: str, keys: Mapping[str, Any], facts: Mapping[str, Any], trusted: bool = True) -> Balancing:
    """Return an instance of `keys["_target_"]`, created with its own keys, which exclude `COMMON_KEYS`, and `facts`.

    Raises:
        UserError: see `build_balancing`.
    """
    strategy = import_strategy(name, keys.get("_target_"), trusted)
    arguments = {key: value for key, value in keys.items() if key not in COMMON_KEYS}
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
    allowed = trusted or module.startswith("simbal.")  # the search for entry points takes 10 ms
    if not (allowed or f"{module}:{attribute}" in {point.value for point in entry_points(group=ENTRY_POINT_GROUP)}):
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
