"""Checks the part of a command line that is Hydra's own: the launcher, the sweeper and their keys.

Only a command line that names some of them pays for what Hydra knows of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, get_origin, get_type_hints

from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override, QuotedString
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from simbal.cli.nearest import nearest
from simbal.config.catalogue import Catalogue, inherited, read
from simbal.config.check import interpolation_fault
from simbal.config.values import words
from simbal.errors import UserError
from simbal.sweep.search.settings import SearchSettings

PACKAGES = {"ray": "ray", "slurm": "submitit"}  # of launchers, which extras of the same name install
NOT_OURS = {"hydra/launcher": {"basic"}}  # Hydra's own, which knows nothing of runs that are finished
USUAL = {"hydra/launcher": "procs", "hydra/sweeper": "grid"}
MODES = ("RUN", "MULTIRUN")
NAME = "optuna"
PREFIX = "hydra.sweeper."
TYPES = {f.name: f.type for f in fields(SearchSettings)}


def check_hydra(overrides: Sequence[Override], catalogue: Catalogue, sweep: str | None) -> None:
    """Check the options and keys of `hydra` that the overrides name.

    Args:
        overrides: the command line's.
        catalogue: of the program.
        sweep: the named sweep that they choose.

    Raises:
        UserError: for an option, a key or a kind of value that there is not.
    """
    sweeper, settings = catalogue.sweeper(sweep) if sweep else (None, {})
    check_sweeper_keys(overrides, f"sweeps={sweep}", sweeper, settings)
    chosen = USUAL | ({"hydra/sweeper": sweeper} if sweeper else {})
    for override in overrides:
        if override.key_or_group.startswith("hydra/"):
            _check_option(override, catalogue)
            chosen[override.key_or_group] = str(override.value())
    for key, value in settings.items() if chosen["hydra/sweeper"] == USUAL["hydra/sweeper"] else ():
        _check_part(f"sweeps={sweep}", f"{PREFIX}{key}", value, chosen, catalogue)
    for override in overrides:
        if override.key_or_group.startswith("hydra."):
            line, value = str(override.input_line), override.value()
            _check_part(line, override.key_or_group, value, chosen, catalogue)
            if override.key_or_group == "hydra.mode" and str(value) not in MODES:
                raise UserError(f"{line} is not one of {', '.join(MODES)}")


def check_launcher(overrides: Iterable[Override]) -> None:
    """Raise `UserError` if the launcher that the overrides choose is not installed."""
    for override in overrides:
        launcher = str(override.value()) if override.key_or_group == "hydra/launcher" else ""
        if launcher in PACKAGES and find_spec(PACKAGES[launcher]) is None:
            raise UserError(f"{override.input_line} is not installed: pip install 'simbal[{launcher}]'")


def check_sweeper_keys(overrides: Iterable[Override], sweep: str, chosen: str | None, keys: dict[str, Any]) -> None:
    """Check the overrides of `hydra.sweeper`, and what a named sweep sets of it.

    Args:
        overrides: the command line's.
        sweep: the named sweep as it is chosen, such as `sweeps=significance`; "" without one.
        chosen: the sweeper that it chooses, if it does.
        keys: what it sets of `hydra.sweeper`.

    Raises:
        UserError: for an unknown key, or a value of the wrong kind; the sentence says what there is.
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


def sweeper_lines(
    overrides: Iterable[Override], params: dict[str, Any], arms: list[str]
) -> tuple[list[str], list[str]]:
    """Return the grid as `key=value` lines, and the lines of its arms, as the command line changes them.

    Args:
        overrides: the command line's.
        params: the named sweep's.
        arms: the named sweep's.
    """
    params = dict(params)
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if key.startswith(f"{PREFIX}params."):
            params[key.removeprefix(f"{PREFIX}params.")] = override.get_value_string()
        elif key == f"{PREFIX}params" and isinstance(value, dict):
            params |= value
        elif key == f"{PREFIX}arms" and isinstance(value, list):
            arms = [item.text if isinstance(item, QuotedString) else str(item) for item in value]
    return [f"{key}={value}" for key, value in params.items()], arms


def _check_option(override: Override, catalogue: Catalogue) -> None:
    group, option = override.key_or_group, override.value()
    groups = [f"hydra/{name}" for name in _in_store("hydra") if _in_store(f"hydra/{name}")]
    if group not in groups:
        raise UserError(f"{override.input_line}: there is no group {group}{nearest(group, groups)}")
    of_user = [file.stem for folder in catalogue.folders for file in folder.glob(f"{group}/*.yaml")]
    options = sorted({*_in_store(group), *of_user} - NOT_OURS.get(group, set()))
    if option is not None and str(option) not in options:
        raise UserError(
            f"{override.input_line}: {group} has no option {option}{nearest(str(option), options)} "
            f"(there is {', '.join(options)})"
        )


def _in_store(group: str) -> list[str]:
    """Return the names of what Hydra and its plugins have in a folder of the config: options and further folders."""
    packaged = files("hydra.conf").joinpath(group)
    names = [file.name for file in packaged.iterdir()] if packaged.is_dir() else []
    return sorted(name.removesuffix(".yaml") for name in {*names, *_of_plugins(group)} if not name.startswith("_"))


def _of_plugins(group: str) -> list[str]:
    Plugins.instance()  # whose plugins list their options
    try:
        return ConfigStore.instance().list(group)
    except OSError:  # there is no such folder
        return []


def _check_part(line: str, key: str, value: Any, chosen: dict[str, str], catalogue: Catalogue) -> None:
    """Raise `UserError` unless Hydra, or the launcher or sweeper that is chosen, has the key, and for such values."""
    _, part, *rest = key.split(".")
    group = f"hydra/{part}"
    if group not in chosen or not rest:
        known, name, where = [field.name for field in fields(HydraConf)], part, "hydra"
    else:
        known, name, where = _keys_of(group, chosen[group], catalogue), rest[0], f"hydra.{part}"
    if known and name not in known:
        raise UserError(f"{line}: {where} has no key {name}{nearest(name, known)} (there is {', '.join(known)})")
    node = _node(group, chosen.get(group, ""))
    if node is None or len(rest) != 1 or not isinstance(value, str | int | float | list | None):
        return
    try:
        node[name] = value
    except OmegaConfBaseException:
        kind = get_type_hints(OmegaConf.get_type(node))[name]
        raise UserError(f"{line}: {key} must be {words(kind)}") from None


def _keys_of(group: str, option: str, catalogue: Catalogue, heirs: Sequence[str] = ()) -> list[str]:
    """Return the keys of an option; none for one that only Hydra can compose."""
    for folder in catalogue.folders:
        if (file := folder / group / f"{option}.yaml").is_file():
            content, heirs = read(file), [*heirs, option]
            names = inherited(content)
            if repeated := [name for name in names if name in heirs]:
                raise UserError(f"{file}: defaults cannot name {repeated[0]}, which inherits it")
            of_others = [key for name in names for key in _keys_of(group, name, catalogue, heirs)]
            return [*dict.fromkeys([*of_others, *(key for key in content if key != "defaults")])]
    node = _node(group, option)
    return [] if node is None else [str(key) for key in node if not str(key).startswith("_")]


def _node(group: str, option: str) -> Any:
    """Return a copy of the typed keys of an option; None for one that is none of a plugin."""
    file = f"{option}.yaml"
    return ConfigStore.instance().load(f"{group}/{file}").node.copy() if file in _of_plugins(group) else None


def _check(key: str, value: Any, place: str, line: str) -> None:
    name = key.partition(".")[0]
    if name not in TYPES:
        raise UserError(f"{place}: there is no such key; {PREFIX[:-1]} has {', '.join(TYPES)}")
    if key != name:  # a key of params, which the grammar of overrides checks
        return
    settings = OmegaConf.structured(SearchSettings)
    try:
        settings[name] = value
        OmegaConf.to_container(settings, resolve=True)
    except InterpolationResolutionError as error:
        raise UserError(f"{line}: {interpolation_fault(error)}") from None
    except OmegaConfBaseException:
        kind = "a list such as [a,b]" if get_origin(TYPES[name]) is list else words(TYPES[name])
        raise UserError(f"{line}: {PREFIX}{name} must be {kind}") from None
