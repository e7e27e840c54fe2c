"""From the `balancing` group of a config to the strategies."""

import inspect
from collections.abc import Mapping
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
    strategy = get_class(keys["_target_"])
    arguments = {key: value for key, value in keys.items() if key not in ("_target_", "schedule")}
    signature = inspect.signature(strategy)
    arguments |= {fact: value for fact, value in facts.items() if fact in signature.parameters}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UserError(f"balancing.{name}: {strategy.__name__}: {error}") from None
    try:
        return strategy(**arguments)  # type: ignore[no-any-return]
    except UserError as error:
        raise UserError(f"balancing.{name}.{error}") from None
