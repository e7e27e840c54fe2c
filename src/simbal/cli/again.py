"""Names runs by their folder: `run=FOLDER` goes on with one, `from=FOLDER` begins another one like it.

What lies in a folder may be anybody's. Its config is taken at its word where that decides the result, and not followed
to places that are not the user's own: those have to be given again.
"""

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
from simbal.config.schema import GROUPS, addresses, as_dict, can_change_result, open_keys
from simbal.config.values import changed, flatten
from simbal.errors import HIDDEN, UserError
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec, as_written
from simbal.sweep import spans

RUN, FROM = "run", "from"
SENT_TO = ("data.cache_dir", "logger.tracking_uri", "logger.offline")  # where a run writes beside its folder
ROUNDING = ("trainer.devices", "trainer.strategy")  # all that they change: a run may go on with others
INTERPOLATION = "${"
LEADS_AWAY = re.compile(rf"://|\$\{{|{re.escape(HIDDEN)}")  # to another host, to a variable, or nowhere


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
        UserError: there is no such run, conf/ has not what it names, its text lies where only the user can say, or a
            named sweep says too what is trained.
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
            _require_near(folder, key, value)
            added = key not in usual and key.rpartition(".")[0] in open_keys()
            lines.append(f"{'++' if added else ''}{key}={literal(value)}")
    gone = [key for key in usual if key.rpartition(".")[0] in open_keys() and key not in flat]
    lines += [f"~{key}" for key in gone]
    return [*spans.parse(lines, (), OverridesParser.create()), *own]


def run_of(overrides: Sequence[Override], catalogue: Catalogue) -> RunSpec | None:
    """Return the run at `run=`, with the values of the other overrides, which may not make another run of it.

    Returns:
        None without `run=`.

    Raises:
        UserError: there is no such run, an override makes another one of it, or it leads to a place that is not the
            user's own.
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
    groups = [group for group in ("data", "logger") if spec.choices[group] in catalogue.options[group]]
    usual = catalogue.keys({group: [spec.choices[group]] for group in groups})
    of_mlflow = ["output_dir"] if config["logger.kind"] == "mlflow" else []  # where its store is, if it is no server
    sent_to = {*SENT_TO, *of_mlflow}
    for key in sorted(sent_to | addresses()):
        if key in config and key not in given and config[key] != usual.get(key):
            _require_near(folder, key, config[key], sent=key in sent_to)
    real = resolved(OmegaConf.create(values))
    kept = {key: value for key, value in real.items() if key not in ROUNDING}
    shown = {key: as_written(values[key]) if key in addresses() else value for key, value in kept.items()}
    again = replace(spec, config=checked(changed(as_dict(spec.config), real)), written=changed(spec.written, shown))
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


def _require_near(folder: Path, key: str, value: Any, sent: bool = False) -> None:
    """Raise `UserError` for a value behind a URL or a variable, or that says where something is `sent`.

    The user has to give such a value.
    """
    away = LEADS_AWAY.search(str(value)) if key in addresses() else INTERPOLATION in str(value)
    if sent or away:
        raise UserError(f"{folder} has {key}={value}, where a config is not followed: say it yourself, {key}=...")
