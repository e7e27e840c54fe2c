"""Builds the strategies of a config's `balancing` group."""

import inspect
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from hydra.utils import get_class

import simbal
from simbal.balancing.base import Balancing
from simbal.balancing.composition import Composition
from simbal.config.schedule import Schedule
from simbal.config.values import check_arguments
from simbal.errors import UserError


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
    asked = {fact: facts[fact] for fact in facts.keys() & signature(strategy).parameters.keys()}
    try:
        return strategy(**arguments, **asked)
    except UserError as error:
        raise UserError(f"balancing.{name}.{error}") from None


GROUP = "simbal.strategies"  # of entry points: NAME = "module:Class"
DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def any_class(name: str, target: object) -> type[Balancing]:
    """Return the class that a dotted path of the user's command line names; it may lie in any package or module.

    Nothing is imported that is no regular package or module: any folder passes for a namespace package.

    Raises:
        UserError: there is none, or it is no strategy.
    """
    try:
        spec = find_spec(str(target).partition(".")[0])
        found = get_class(str(target)) if spec and spec.origin else None
    except (ImportError, ValueError, AttributeError):
        found = None
    return _strategy(name, target, found)


def trusted_class(name: str, target: object) -> type[Balancing]:
    """Return the class that a dotted path of a run's config.yaml names, which may come from anybody.

    It is in one of simbal's files, or one that an installed package has registered as an entry point of `GROUP`.
    That is found out before anything is imported: importing a file executes it.

    Raises:
        UserError: it is neither, or no strategy.
    """
    module, _, attribute = str(target).rpartition(".")
    if not DOTTED.fullmatch(str(target)) or not (_is_of_simbal(module) or _is_registered(module, attribute)):
        raise UserError(
            f"balancing.{name}: _target_={target} is not imported: the config.yaml of a run may name a strategy of "
            f"simbal, or one that an installed package has registered as an entry point of the group {GROUP}"
        )
    try:
        found = getattr(import_module(module), attribute, None)
    except ImportError:
        found = None
    return _strategy(name, target, found)


def _is_of_simbal(module: str) -> bool:
    """Whether a module is a file in the folder of simbal, through whatever links."""
    top, *parts = module.split(".")
    if top != simbal.__name__ or not parts:
        return False
    for root in map(Path, simbal.__path__):
        files = (root.joinpath(*parts).with_suffix(".py"), root.joinpath(*parts, "__init__.py"))
        if any(file.is_file() and file.resolve().is_relative_to(root.resolve()) for file in files):
            return True
    return False


def _is_registered(module: str, attribute: str) -> bool:
    """Whether an installed package has registered the class; one in the current folder is not installed."""
    folders = [folder for folder in sys.path if Path(folder).resolve() != Path.cwd()]
    points = (point for package in distributions(path=folders) for point in package.entry_points)
    return any(point.group == GROUP and (point.module, point.attr) == (module, attribute) for point in points)


def _strategy(name: str, target: object, found: object) -> type[Balancing]:
    if not inspect.isclass(found) or not issubclass(found, Balancing):
        raise UserError(f"balancing.{name}: _target_={target} names no subclass of simbal.balancing.base.Balancing")
    return found
