"""Checks the keys of `hydra.sweeper` for `hydra/sweeper=optuna`, in one sentence where Hydra would need five lines."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, get_args, get_origin

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from simbal.errors import UserError
from simbal.search.settings import SearchSettings

NAME = "optuna"
PREFIX = "hydra.sweeper."
TYPES = {f.name: f.type for f in fields(SearchSettings)}
WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def check_sweeper_keys(overrides: Iterable[Override], sweep: str, chosen: str | None, keys: dict[str, Any]) -> None:
    """Check the overrides of `hydra.sweeper`, and what a named sweep sets of it.

    Args:
        overrides: the command line's.
        sweep: the named sweep as it is chosen, such as `sweeps=significance`; "" without one.
        chosen: the sweeper that it chooses, if it does.
        keys: what it sets of `hydra.sweeper`.

    Raises:
        UserError: for a key that there is not, or a value of the wrong kind; the sentence says what there is.
    """
    own = [*overrides]
    sweepers = [str(override.value()) for override in own if override.key_or_group == "hydra/sweeper"]
    if [*filter(None, [chosen]), *sweepers][-1:] != [NAME]:
        return
    for key, value in keys.items():
        _check(key, value, f"{sweep}: {PREFIX}{key}", f"{sweep}: {PREFIX}{key}={value}")
    for override in own:
        key = override.key_or_group
        if key.startswith(PREFIX) and not override.is_delete():
            _check(key.removeprefix(PREFIX), override.value(), key, str(override.input_line))


def _check(key: str, value: Any, place: str, line: str) -> None:
    name = key.partition(".")[0]
    if name not in TYPES:
        raise UserError(f"{place}: there is no such key; {PREFIX[:-1]} has {', '.join(TYPES)}")
    if key != name:  # a key of params, which the grammar of overrides checks
        return
    said = place if name == "storage" else line  # which may hold a password
    settings = OmegaConf.structured(SearchSettings)
    try:
        settings[name] = value
        OmegaConf.to_container(settings, resolve=True)
    except InterpolationResolutionError as error:
        raise UserError(f"{said}: {str(error).splitlines()[0]}") from None
    except OmegaConfBaseException:
        raise UserError(f"{said}: {PREFIX}{name} must be {_kind(TYPES[name])}") from None


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is list:
        return "a list such as [a,b]"
    if get_origin(annotation) is dict:
        return "keys with values"
    return " or ".join(WORDS[part] for part in get_args(annotation) or (annotation,))
