"""Names runs by their folder: `run=FOLDER` goes on with one, `from=FOLDER` begins another one like it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from omegaconf import OmegaConf

from simbal.config.catalogue import Catalogue
from simbal.config.check import checked, resolved
from simbal.config.schema import GROUPS, as_dict, can_change_result, open_keys
from simbal.config.values import changed, flatten
from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec
from simbal.sweep import spans

RUN, FROM = "run", "from"
ROUNDING = ("trainer.devices", "trainer.strategy")  # all that they change: a run may go on with others


def folder_of(key: str, overrides: Iterable[Override]) -> Path | None:
    """Return the folder that `key`, `run` or `from`, names among the overrides; None if it is not there."""
    named = [override for override in overrides if override.key_or_group == key]
    if not named:
        return None
    value = named[0].value()
    if len(named) > 1 or not isinstance(value, str | QuotedString) or not str(value):
        raise UserError(f"{key}= takes one folder of a run, such as {key}=outputs/default/RUN")
    folder = Path(value.text if isinstance(value, QuotedString) else value)
    if not folder.is_dir():
        raise UserError(f"{key}={folder}: there is no such folder; a run is in outputs/<name>/<run>")
    return folder


def begun_from(overrides: Sequence[Override], catalogue: Catalogue) -> list[Override]:
    """Return the overrides, with those that compose to the config of the run at `from=` in its place.

    Only what can change the result is taken over, and no key that the others give, or whose option they choose anew.

    Raises:
        UserError: there is no such run, conf/ has not what it names, or a named sweep says too what is trained.
    """
    folder = folder_of(FROM, overrides)
    if folder is None:
        return [*overrides]
    if sweep := next((override for override in overrides if override.key_or_group == "sweeps"), None):
        raise UserError(f"from={folder} and {sweep.input_line} both say what is trained: give one of them")
    own = [override for override in overrides if override.key_or_group != FROM]
    given = {override.key_or_group for override in own}
    spec = RunFolder(folder).read_spec()
    options = {group: _options(spec, group, folder, catalogue) for group in GROUPS if group not in (*given, "logger")}
    usual = catalogue.keys(options)
    lines = [f"{group}={chosen[0] if len(chosen) == 1 else literal(chosen)}" for group, chosen in options.items()]
    flat = flatten(as_dict(spec.config))
    for key, value in flat.items():
        of_chosen = key.partition(".")[0] in (*options, key) and not key.endswith("._target_")
        if of_chosen and can_change_result(key) and key not in given and usual.get(key, ...) != value:
            added = key not in usual and key.rpartition(".")[0] in open_keys()
            lines.append(f"{'++' if added else ''}{key}={literal(value)}")
    gone = [key for key in usual if key.rpartition(".")[0] in open_keys() and key not in flat]
    lines += [f"~{key}" for key in gone]
    return [*spans.parse(lines, (), OverridesParser.create()), *own]


def run_of(overrides: Sequence[Override]) -> RunSpec | None:
    """Return the run at `run=`, with the values of the other overrides, which may not make another run of it.

    Returns:
        None without `run=`.

    Raises:
        UserError: there is no such run, or an override makes another one of it.
    """
    folder = folder_of(RUN, overrides)
    if folder is None:
        return None
    spec = RunFolder(folder).read_spec()
    given = {override.key_or_group: override for override in overrides if override.key_or_group != RUN}
    config = flatten(as_dict(spec.config))
    for key, override in given.items():
        if key not in config or override.is_sweep_override() or override.is_delete():
            raise UserError(f"{override.input_line}: run= goes on with one run, and takes values for its keys alone")
    values = {key: plain(override.value()) for key, override in given.items()}
    real = resolved(OmegaConf.create(values))
    kept = {key: value for key, value in real.items() if key not in ROUNDING}
    again = replace(spec, config=checked(changed(as_dict(spec.config), real)), written=changed(spec.written, kept))
    if again.hash != spec.hash:
        lines = " ".join(str(override.input_line) for override in given.values())
        raise UserError(f"{lines} makes another run of {folder}: begin that by from={folder} {lines}")
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


def _options(spec: RunSpec, group: str, folder: Path, catalogue: Catalogue) -> list[str]:
    """Return the options that the run was composed of in a group; `UserError` unless they mean what they did."""
    known = catalogue.options[group]
    named = [spec.choices[group]]
    if group == "balancing" and named[0] not in known:  # a list of them, or an option whose strategies have other names
        named = [*spec.config.balancing]
    unknown = [option for option in named if option not in known]
    if unknown:
        raise UserError(f"{folder} was composed of {group}={unknown[0]}, which is not in conf/: give {group}=")
    if group == "balancing":
        targets = {name: target for option in named for name, target in catalogue.targets(group, option).items()}
        for name, keys in spec.config.balancing.items():
            if targets.get(name) != keys.get("_target_"):
                raise UserError(f"{folder} was trained by {keys.get('_target_')}, which conf/ has not: give balancing=")
    return named
