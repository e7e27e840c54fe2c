"""Any set of strategies at once: the objective's auxiliary terms, and the one decision on a token's experts.

`build_balancing` makes it from the `balancing` group of a config.
Shapes: B sequences, S sequence length, N = B*S tokens, L MoE layers, E experts.
"""

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing, FinishedStep
from simbal.config.schedule import Schedule
from simbal.config.signatures import check_arguments
from simbal.config.values import one_of
from simbal.errors import UserError
from simbal.model.router import Candidates, Router, Routing, product

GROUP = "simbal.strategies"  # of entry points: NAME = "module:Class"


class Composition(nn.Module):
    """A set of strategies: losses add, each with its own schedule; at most one may decide the choice of experts.

    `parts` has the strategies by name. `chooser` is the name of the one that chooses a token's experts, or None;
    `adjuster` that of the one that adjusts logits.
    """

    def __init__(
        self, parts: Mapping[str, Balancing], schedules: Mapping[str, Schedule], layer_reduce: str = "sum"
    ) -> None:
        """Put strategies together.

        Args:
            parts: each strategy by name.
            schedules: the factor of a strategy's coefficient over the steps; a strategy without one keeps it.
            layer_reduce: sum or mean of a loss over layers, where the strategy does not say.

        Raises:
            UserError: two strategies choose experts, two adjust logits, or two set the router's weight; or a reduction
                that there is not.
        """
        super().__init__()
        self.parts, self.strategies = dict(parts), nn.ModuleDict(parts)  # the latter for its state and its device
        self.schedules, self.layer_reduce = dict(schedules), one_of("layer_reduce", layer_reduce, ("sum", "mean"))
        self.chooser = _only("choose a token's experts", self._overriding("choice_scores"))
        self.mapper = _only("map hidden states to logits", self._overriding("logits"))
        self.adjuster = _only("adjust the router's logits", self._overriding("adjust_logits"))
        _only("set the router's weight", [name for name, part in parts.items() if part.sets_router_weight])

    def _overriding(self, method: str) -> list[str]:
        """Return the names of the strategies that override `method`."""
        return [n for n, part in self.parts.items() if getattr(type(part), method) is not getattr(Balancing, method)]

    @property
    def steers(self) -> bool:
        """Whether a router decides otherwise than it would alone."""
        return any(name is not None for name in (self.chooser, self.mapper, self.adjuster))

    @property
    def ragged(self) -> bool:
        """Whether a token may have any number of experts."""
        return self.chooser is not None and self.parts[self.chooser].ragged

    @property
    def drops(self) -> bool:
        """Whether a ragged choice leaves out some experts of the K largest logits, and the rest keep their weights."""
        return self.chooser is not None and self.parts[self.chooser].drops

    @property
    def router_init(self) -> str:
        """The start of the router that the parts prefer: orthogonal if any of them does, else normal."""
        return "orthogonal" if "orthogonal" in {part.router_init for part in self.parts.values()} else "normal"

    @property
    def needs_step_counts(self) -> bool:
        """Whether some loss needs what is measured over the whole step."""
        return any(part.needs_step_counts for part in self.parts.values())

    def prepare(self, routers: Sequence[Router]) -> None:
        """Show every strategy the routers once, at their initial weights.

        Raises:
            UserError: a strategy cannot work on such routers, or its loss on weights that another has frozen.
        """
        for part in self.parts.values():
            part.prepare(routers)
        chooser = Balancing if self.chooser is None else self.parts[self.chooser]
        if "relu" not in chooser.gatings and any(router.gating == "relu" for router in routers):
            raise UserError(
                "router=relu gives an expert whose logit is not above 0 the weight 0, and only balancing=remoe leaves "
                "it out: add it, or use router=softmax"
            )
        frozen = bool(routers) and not any(p.requires_grad for router in routers for p in router.parameters())
        for name, part in self.parts.items():
            of_router = part.properties.scope == "weights" and not part.needs_experts
            if frozen and part.properties.differentiable and of_router:
                raise UserError(f"balancing: {name} is a loss on the router's weight, and here nothing trains it")

    def logits(self, x_ND: Tensor, weight_ED: Tensor, layer: int) -> Tensor:
        """Return the logits, (N, E), by the strategy that maps hidden states to them; x W^T if none does."""
        map_to_logits = product if self.mapper is None else self.parts[self.mapper].logits
        return map_to_logits(x_ND, weight_ED, layer)

    def adjust_logits(self, logits_NE: Tensor) -> Tensor:
        """Return the logits, (N, E), as the strategy adjusts them that does so; unchanged if none does."""
        return logits_NE if self.adjuster is None else self.parts[self.adjuster].adjust_logits(logits_NE)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the scores, (N, E), by the strategy that chooses; the logits if none does."""
        return candidates.logits_NE if self.chooser is None else self.parts[self.chooser].choice_scores(candidates)

    def layer_reduction(self, name: str) -> str:
        """Return how the losses of strategy `name` are reduced over layers: sum or mean."""
        return self.parts[name].over_layers or self.layer_reduce

    def losses(
        self, routings: Sequence[Routing], step: int = 0, step_counts: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return the term of each strategy that has a loss, a scalar; a dense model has no layer, hence no term.

        Args:
            routings: of each layer.
            step: the number of the optimizer step, for the schedules.
            step_counts: what each strategy measures in the whole step, (L, E), for those that need it.
        """
        terms = {}
        for name, part in self.parts.items() if routings else ():
            if part.properties.differentiable:
                loss_L = part.losses(routings, step_counts[name] if step_counts and part.needs_step_counts else None)
                reduced = loss_L.sum() if self.layer_reduction(name) == "sum" else loss_L.mean()
                terms[name] = self.schedule(name).factor(step) * reduced
        return terms

    def schedule(self, name: str) -> Schedule:
        """Return the schedule of strategy `name`; a constant 1 if it was given none."""
        return self.schedules.get(name, Schedule())

    @torch.no_grad()
    def measure(self, routings: Sequence[Routing]) -> dict[str, Tensor]:
        """Return what each strategy measures, (L, ...), to be summed over the step; nothing for a dense model."""
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
        """Update every strategy after optimizer step `step`, with the sums of what it measured."""
        for name, measured_LE in measured.items():
            factor = self.schedule(name).factor(step)
            self.parts[name].update(FinishedStep(measured_LE, num_measured, router_weights, lr, factor))


def _only(does: str, names: Sequence[str]) -> str | None:
    """Return the one name, or None if there is none; `UserError` if there are two."""
    if len(names) > 1:
        raise UserError(f"balancing: {' and '.join(names)} both {does}, and only one strategy of a set can")
    return names[0] if names else None


def build_balancing(
    group: Mapping[str, Mapping[str, Any]],
    facts: Mapping[str, int],
    max_steps: int,
    layer_reduce: str,
    trusted: bool = True,
) -> Composition:
    """Return the composition of every strategy of the group, each under its name.

    Args:
        group: for each strategy its `_target_`, its constructor's arguments and, if it has one, its `schedule`.
        facts: num_layers, num_experts and seed, for the constructors that ask for them by name.
        max_steps: of the run; no schedule may end after it.
        layer_reduce: sum or mean of a loss over layers, where the strategy does not say.
        trusted: the config is the user's and may name any class; else it was read from a folder.

    Raises:
        UserError: a class that the config may not name, a key or a value that the strategy does not take, or
            strategies that exclude each other.
    """
    parts = {name: build_strategy(name, keys, facts, trusted) for name, keys in group.items()}
    schedules = {
        name: Schedule.parse(f"balancing.{name}.schedule", keys.get("schedule"), max_steps)
        for name, keys in group.items()
    }
    return Composition(parts, schedules, layer_reduce)


def build_strategy(name: str, keys: Mapping[str, Any], facts: Mapping[str, int], trusted: bool = True) -> Balancing:
    """Return `keys["_target_"]` called with the other keys but `schedule`, and with the facts that it names.

    Raises:
        UserError: as in `build_balancing`.
    """
    strategy = (any_class if trusted else trusted_class)(name, keys.get("_target_"))
    arguments = {key: value for key, value in keys.items() if key not in ("_target_", "schedule")}
    check_arguments(f"balancing.{name}.", strategy, arguments, given=facts)
    asked = {fact: facts[fact] for fact in facts.keys() & inspect.signature(strategy).parameters.keys()}
    try:
        return strategy(**arguments, **asked)
    except UserError as error:
        raise UserError(f"balancing.{name}.{error}") from None


def any_class(name: str, target: object) -> type[Balancing]:
    """Return the class that a dotted path of the user's command line names; it may lie in any package or module.

    Nothing is imported that is no regular package or module: any folder passes for a namespace package.

    Raises:
        UserError: there is none, or it is no strategy.
    """
    from hydra.utils import get_class  # strategies without a config need no Hydra

    package, why = str(target).partition(".")[0], ""
    try:
        spec = find_spec(package)
        found = get_class(str(target)) if spec and spec.origin else None
        if not found:  # a folder in which one stands is not looked at
            why = f": no package {package} is installed"
    except (ImportError, ValueError, AttributeError):
        found = None
    return _strategy(name, target, found, why)


def trusted_class(name: str, target: object) -> type[Balancing]:
    """Return the class that a dotted path of a run's config.yaml names, which may come from anybody.

    It is in simbal, or one that an installed package has registered as an entry point of `GROUP`; importing any other
    module would execute it.

    Raises:
        UserError: it is neither, or no strategy.
    """
    module, _, attribute = str(target).rpartition(".")
    registered = any(point.value == f"{module}:{attribute}" for point in entry_points(group=GROUP))
    if not registered and not module.startswith("simbal."):
        raise UserError(
            f"balancing.{name}: _target_={target} is not imported: the config.yaml of a run may name a strategy of "
            f"simbal, or one that an installed package has registered as an entry point of the group {GROUP}"
        )
    try:
        found = getattr(import_module(module), attribute, None)
    except ImportError:
        found = None
    return _strategy(name, target, found)


def _strategy(name: str, target: object, found: object, why: str = "") -> type[Balancing]:
    if not inspect.isclass(found) or not issubclass(found, Balancing):
        raise UserError(
            f"balancing.{name}: _target_={target} names no subclass of simbal.balancing.base.Balancing{why}"
        )
    return found
