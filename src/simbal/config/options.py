"""The YAML files of conf/: the options of each group and the keys that each option sets, read without Hydra."""

import re
from pathlib import Path
from typing import Any

import yaml

from simbal.config.values import flatten
from simbal.errors import ConfigError

CONF = (Path(__file__).parents[1] / "conf").resolve()  # a link to conf/ in a checkout, a folder in a wheel
SWEEPS = "sweeps"  # the group of named sweeps
GLOBAL_PACKAGE = "# @package _global_"
_BEFORE_OVERRIDE = re.compile(r"\s+(?=~|\+*[\w./@]+=)")


def local_conf() -> list[Path]:
    """Return the conf/ folder of the current project, which extends `CONF`; [] if there is none."""
    return _unless_same(Path("conf"), CONF)


def local_sweeps() -> list[Path]:
    """Return sweeps/ of the current folder, which adds named sweeps; [] if it is missing or belongs to `CONF`."""
    return _unless_same(Path(SWEEPS), CONF / SWEEPS)


def options(group: str) -> dict[str, Path]:
    """Return the file of each option in a group; options of the current folder come last.

    Raises:
        ConfigError: a file is hidden by an earlier one with the same name and different content.
    """
    folders = [folder / group for folder in (CONF, *local_conf())] + (local_sweeps() if group == SWEEPS else [])
    files: dict[str, Path] = {}
    for file in (file for folder in folders for file in sorted(folder.glob("*.yaml"))):
        first = files.setdefault(file.stem, file)
        if file.read_bytes() != first.read_bytes():
            raise ConfigError(f"{file} is never read because {first} has the same name: rename it")
    return files


def check_options_here() -> None:
    """Raise `ConfigError` if a file in conf/ or sweeps/ of the current folder would never be read."""
    for conf in local_conf():
        for group in ["", *(path.name for path in conf.iterdir())]:
            options(group)
    if local_sweeps():
        options(SWEEPS)


def option_keys(group: str, option: str) -> dict[str, Any]:
    """Return the dotted keys that an option sets, including inherited ones, with their values."""
    file = options(group)[option]
    content, keys = read(file), dict[str, Any]()
    for parent in content.get("defaults") or []:
        if isinstance(parent, str) and parent != "_self_":
            keys |= option_keys(group, parent.partition("@")[0])
    values = {key: value for key, value in content.items() if key not in ("defaults", "hydra")}
    is_global = file.read_text(encoding="utf-8").startswith(GLOBAL_PACKAGE)
    return keys | flatten(values, "" if is_global else f"{group}.")


def default_choices(root: str) -> dict[str, list[str]]:
    """Return the options that a root config such as `config` or `evaluate` selects in each group."""
    items = [item for item in read(CONF / f"{root}.yaml").get("defaults") or [] if isinstance(item, dict)]
    pairs = [(group, option) for item in items for group, option in item.items()]
    return {
        group: option if isinstance(option, list) else [option] * (option is not None)
        for group, option in pairs
        if not group.startswith("override ") and "@" not in group
    }


def sweeper_of(sweep: str) -> str | None:
    """Return the sweeper that a named sweep, or a sweep that it inherits, selects; None for the default."""
    file, sweeper = options(SWEEPS).get(sweep), None
    for item in (read(file).get("defaults") or []) if file else []:
        if isinstance(item, dict) and "override /hydra/sweeper" in item:
            return str(item["override /hydra/sweeper"])
        if isinstance(item, str) and item not in ("_self_", sweep):
            sweeper = sweeper_of(item)
    return sweeper


def overridden_options(file: Path) -> dict[str, str]:
    """Return the options of other groups that an option selects, such as `{"router": "relu"}` for balancing=remoe."""
    items = [item for item in read(file).get("defaults") or [] if isinstance(item, dict)]
    pairs = [(key.removeprefix("override /"), value) for item in items for key, value in item.items()]
    return {key.partition("@")[0]: str(value) for key, value in pairs}


def first_comment(file: Path) -> list[str]:
    """Return the lines of the comment at the top of a YAML file, without the `@package` line."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if line != GLOBAL_PACKAGE:
            lines.append(line.lstrip("# ").rstrip())
    return lines


def split_arm(line: str) -> list[str]:
    """Split an arm into overrides, but not at spaces inside a value such as `tag(log, interval(1, 2))`."""
    return [part for part in _BEFORE_OVERRIDE.split(line.strip()) if part]


def read(file: Path) -> dict[str, Any]:
    """Return the content of a YAML file; `ConfigError` if it cannot be read or is not a mapping."""
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader) or {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must contain keys and values")
    return content


def _unless_same(folder: Path, other: Path) -> list[Path]:
    return [folder] if folder.is_dir() and not folder.samefile(other) else []
