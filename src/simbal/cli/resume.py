"""Resumes a run with `run=FOLDER`, or starts a new run from another run's config with `from=FOLDER`."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, Quote, QuotedString
from omegaconf import OmegaConf

from simbal.config.compose import resolve, validate
from simbal.config.options import option_keys, options
from simbal.config.schema import GROUPS, Config, can_change_result
from simbal.config.values import flatten, with_values
from simbal.errors import ConfigError
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec

ROUNDING_KEYS = ("trainer.devices", "trainer.strategy")  # they affect results only by rounding


def find_folder(key: str, overrides: Iterable[Override]) -> Path | None:
    """Return the folder that the override `run=` or `from=` names; None without that override."""
    values = [override.value() for override in overrides if override.key_or_group == key]
    if not values:
        return None
    if len(values) > 1 or not isinstance(values[0], str) or not values[0]:
        raise ConfigError(f"{key}= takes one run folder, such as {key}=outputs/default/RUN")
    if not Path(values[0]).is_dir():
        raise ConfigError(f"{key}={values[0]}: there is no such folder; runs are in outputs/<name>/<run>")
    return Path(values[0])


def run_to_resume(folder: Path, overrides: Sequence[Override]) -> RunSpec:
    """Return the run in `folder` with the values of the other overrides, which must not change its results.

    Raises:
        ConfigError: an override would change the results, or does not set a key.
    """
    spec = RunFolder(folder).read_spec()
    given = {override.key_or_group: override for override in overrides if override.key_or_group != "run"}
    for key, override in given.items():
        if key not in flatten(spec.written) or override.is_sweep_override() or override.is_delete():
            raise ConfigError(f"{override.input_line}: with run= you may only set keys of the run to one value each")
    values = resolve(OmegaConf.create({key: override.value() for key, override in given.items()}))
    kept = {key: value for key, value in values.items() if key not in ROUNDING_KEYS}
    config, written = validate(Config, with_values(spec.written, values)), with_values(spec.written, kept)
    resumed = replace(spec, config=config, written=written)
    if resumed.hash != spec.hash:
        lines = " ".join(str(override.input_line) for override in given.values())
        raise ConfigError(f"{lines} changes the results of {folder}: start a new run with from={folder} {lines}")
    return resumed


def overrides_from(folder: Path, overrides: Sequence[Override]) -> list[str]:
    """Return override lines that compose to the config of the run in `folder`, changed by the other overrides.

    Keys that cannot change the result keep their defaults, and an option that is overridden brings its own keys.

    Raises:
        ConfigError: the run was composed with options that conf/ lacks, or a named sweep is given too.
    """
    given = {each.key_or_group: str(each.input_line) for each in overrides if each.key_or_group != "from"}
    if "sweeps" in given:
        raise ConfigError(f"from={folder} and {given['sweeps']} both define what to train: leave one out")
    spec = RunFolder(folder).read_spec()
    selected = {group: _options_of(spec, group, folder) for group in GROUPS if group not in (*given, "logger")}
    pairs = [(group, name) for group, names in selected.items() for name in names]
    defaults = {key: value for group, name in pairs for key, value in option_keys(group, name).items()}
    for name, keys in spec.config.balancing.items() if "balancing" in selected else ():
        if defaults.get(f"balancing.{name}._target_") != keys["_target_"]:
            raise ConfigError(f"{folder} was trained with {keys['_target_']}, which is not in conf/: set balancing=")
    saved = flatten(spec.written)
    lines = [f"{group}={literal(names) if len(names) > 1 else names[0]}" for group, names in selected.items()]
    for key, value in saved.items():
        group, _, name = key.partition(".")
        is_kept = key not in given and can_change_result(key) and (group in selected or not name)
        if is_kept and defaults.get(key, ...) != value:
            is_new = name and key not in defaults  # of a mapping, such as a package of data=pysource
            lines.append(f"{'++' * bool(is_new)}{key}={literal(value)}")
    lines += [f"~{key}" for key in defaults if key.partition(".")[0] in selected and key not in saved]
    return [*lines, *given.values()]


def _options_of(spec: RunSpec, group: str, folder: Path) -> list[str]:
    """Return the options of a group that the run was composed with; `ConfigError` if conf/ lacks one."""
    names = [spec.choices[group]]
    if group == "balancing" and names[0] not in options(group):  # a list of options
        names = [*spec.config.balancing]
    for name in names:
        if name not in options(group):
            raise ConfigError(f"{folder} was trained with {group}={name}, which is not in conf/: set {group}=")
    return names


def literal(value: Any) -> str:
    """Return a plain value in Hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(literal, value))}]"
    if isinstance(value, str):
        return QuotedString(value, Quote.single).with_quotes()
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
