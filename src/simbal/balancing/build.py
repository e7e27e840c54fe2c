"""From the `balancing` group of a config to the strategies."""

import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from hydra.utils import get_class

from simbal.balancing.base import Balancing
from simbal.balancing.composition import Composition
from simbal.balancing.schedule import Schedule
from simbal.errors import UserError


def build_balancing(
    group: Mapping[str, Mapping[str, Any]], facts: Mapping[str, int], max_steps: int, layer_reduce: str
) -> Composition:
    """Every strategy of the group, each under its name.

    Args:
        group: for each strategy its `_target_`, its constructor's arguments and, if it has one, its `schedule`.
        facts: num_layers, num_experts and seed, for the constructors that ask for them by name.
        max_steps: of the run; no schedule may end after it.
        layer_reduce: sum or mean of a loss over layers, where the strategy does not say.

    Raises:
        UserError: a key or a value that the strategy does not take, or strategies that exclude each other.
    """
    parts = {name: build_strategy(name, keys, facts) for name, keys in group.items()}
    schedules = {
        name: Schedule.parse(f"balancing.{name}.schedule", keys.get("schedule"), max_steps)
        for name, keys in group.items()
    }
    return Composition(parts, schedules, layer_reduce)


def build_strategy(name: str, keys: Mapping[str, Any], facts: Mapping[str, int]) -> Balancing:
    """`keys["_target_"]` called with the other keys but `schedule`, and with the facts that it names."""
    strategy = _strategy(name, keys.get("_target_"))
    arguments = {key: value for key, value in keys.items() if key not in ("_target_", "schedule")}
    signature = inspect.signature(strategy)
    arguments |= {fact: value for fact, value in facts.items() if fact in signature.parameters}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UserError(f"balancing.{name}: {strategy.__name__}: {error}") from None
    try:
        return strategy(**arguments)
    except UserError as error:
        raise UserError(f"balancing.{name}.{error}") from None


def _strategy(name: str, target: Any) -> type[Balancing]:
    """The class that a dotted path names; `UserError` if it is none, or not a strategy.

    The path may stand in the config.yaml of a run from elsewhere. Nothing is imported that is no package or module of
    its own: any folder passes for a namespace package, also a run's with a file of Python in it.
    """
    try:
        spec = find_spec(str(target).partition(".")[0])
        strategy = get_class(str(target)) if spec and spec.origin else None
    except (ImportError, ValueError, AttributeError):
        strategy = None
    if not isinstance(strategy, type) or not issubclass(strategy, Balancing):
        raise UserError(f"balancing.{name}: _target_={target} names no subclass of simbal.balancing.base.Balancing")
    return strategy
