"""Names runs by their folder: `run=FOLDER` continues a run, `from=FOLDER` starts a new one with its config."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, QuotedString
from omegaconf import OmegaConf

from simbal.config.compose import resolved, typed
from simbal.config.options import option_keys, options
from simbal.config.schema import GROUPS, Config, can_change_result, open_keys
from simbal.config.values import flatten, with_values
from simbal.errors import ConfigError
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec

ROUNDING = ("trainer.devices", "trainer.strategy")  # they change the result by rounding only


def folder_of(key: str, overrides: Iterable[Override]) -> Path | None:
    """Return the folder that `key`, `run` or `from`, names among the overrides; None if it is not there."""
    named = [override for override in overrides if override.key_or_group == key]
    if not named:
        return None
    value = named[0].value()
    if len(named) > 1 or not isinstance(value, str | QuotedString) or not str(value):
        raise ConfigError(f"{key}= takes one run folder, such as {key}=outputs/default/RUN")
    folder = Path(value.text if isinstance(value, QuotedString) else value)
    if not folder.is_dir():
        raise ConfigError(f"{key}={folder}: there is no such folder; runs are in outputs/<name>/<run>")
    return folder


def begun_from(folder: Path, overrides: Sequence[Override]) -> list[str]:
    """Return override lines that compose to the config of the run in `folder`, changed by the other overrides.

    Keys that cannot change the result are not taken from the run, nor are keys whose option is chosen anew.

    Raises:
        ConfigError: there is no such run, conf/ lacks one of its options, or a named sweep is given too.
    """
    own = {override.key_or_group: str(override.input_line) for override in overrides if override.key_or_group != "from"}
    if "sweeps" in own:
        raise ConfigError(f"from={folder} and {own['sweeps']} both say what to train: give one of them")
    spec = RunFolder(folder).read_spec()
    chosen = {group: _options(spec, group, folder) for group in GROUPS if group not in (*own, "logger")}
    usual = {
        key: value
        for group, names in chosen.items()
        for name in names
        for key, value in option_keys(group, name).items()
    }
    for name, keys in spec.config.balancing.items() if "balancing" in chosen else ():
        if usual.get(f"balancing.{name}._target_") != keys["_target_"]:
            raise ConfigError(f"{folder} was trained by {keys['_target_']}, which conf/ does not have: give balancing=")
    saved = {key: value for key, value in flatten(spec.written).items() if can_change_result(key)}
    lines = [f"{group}={literal(names) if len(names) > 1 else names[0]}" for group, names in chosen.items()]
    for key, value in saved.items():
        if key not in own and key.partition(".")[0] in (*chosen, key) and usual.get(key, ...) != value:
            lines.append(f"{'++' if key.rpartition('.')[0] in open_keys() else ''}{key}={literal(value)}")
    lines += [f"~{key}" for key in usual if key.rpartition(".")[0] in open_keys() and key not in saved]
    return [*lines, *own.values()]


def run_of(folder: Path, overrides: Sequence[Override]) -> RunSpec:
    """Return the run in `folder` with the values of the other overrides, which may not make another run of it.

    Raises:
        ConfigError: an override makes another run of it, or is not the value of a key.
    """
    spec = RunFolder(folder).read_spec()
    given = {override.key_or_group: override for override in overrides if override.key_or_group != "run"}
    for key, override in given.items():
        if key not in flatten(spec.written) or override.is_sweep_override() or override.is_delete():
            raise ConfigError(f"{override.input_line}: run= continues one run and takes values of its keys only")
    values = resolved(OmegaConf.create({key: plain(override.value()) for key, override in given.items()}))
    kept = {key: value for key, value in values.items() if key not in ROUNDING}
    config, written = typed(Config, with_values(spec.written, values)), with_values(spec.written, kept)
    again = replace(spec, config=config, written=written)
    if again.hash != spec.hash:
        lines = " ".join(str(override.input_line) for override in given.values())
        raise ConfigError(f"{lines} makes another run of {folder}: start that with from={folder} {lines}")
    return again


def literal(value: Any) -> str:
    """Return a plain value as Hydra's grammar reads it again."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(literal, value))}]"
    if isinstance(value, str):
        escaped = re.sub(r"(\\+)$", r"\1\1", re.sub(r"(\\*)'", r"\1\1\\'", value))
        return f"'{escaped}'"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def plain(value: Any) -> Any:
    """Return a value of Hydra's grammar without its quotes."""
    if isinstance(value, dict):
        return {str(plain(key)): plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [*map(plain, value)]
    return value.text if isinstance(value, QuotedString) else value


def _options(spec: RunSpec, group: str, folder: Path) -> list[str]:
    """Return the options that the run was composed of in a group; `ConfigError` if conf/ lacks one."""
    known = options(group)
    names = [spec.choices[group]]
    if group == "balancing" and names[0] not in known:  # a list of options
        names = [*spec.config.balancing]
    for name in names:
        if name not in known:
            raise ConfigError(f"{folder} was composed of {group}={name}, which is not in conf/: give {group}=")
    return names
