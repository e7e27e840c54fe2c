"""The YAML files of conf/: the options of each group and the keys that each option sets, read without Hydra."""

import re
from pathlib import Path
from typing import Any

import yaml

from simbal.config.values import flatten
from simbal.errors import ConfigError

CONF = (Path(__file__).parents[1] / "conf").resolve()  # in a checkout a link to conf/, which lies beside src/
SWEEPS = "sweeps"  # the group of named sweeps
GLOBAL = "# @package _global_"
_BEFORE_OVERRIDE = re.compile(r"\s+(?=~|\+*[\w./@]+=)")


def conf_here() -> list[Path]:
    """Return conf/ of the current folder, which adds options to those of `CONF`; empty if it is `CONF` or missing."""
    return _another(Path("conf"), CONF)


def sweeps_here() -> list[Path]:
    """Return sweeps/ of the current folder, which adds named sweeps; empty if it is that of `CONF` or missing."""
    return _another(Path(SWEEPS), CONF / SWEEPS)


def options(group: str) -> dict[str, Path]:
    """Return the files of a group by option, those of the current folder last.

    Raises:
        ConfigError: a file would never be read, as an earlier one has its name and another content.
    """
    folders = [folder / group for folder in (CONF, *conf_here())] + (sweeps_here() if group == SWEEPS else [])
    files: dict[str, Path] = {}
    for file in (file for folder in folders for file in sorted(folder.glob("*.yaml"))):
        first = files.setdefault(file.stem, file)
        if file.read_bytes() != first.read_bytes():
            raise ConfigError(f"{file} is never read because {first} has the same name: rename it")
    return files


def option_keys(group: str, option: str) -> dict[str, Any]:
    """Return the dotted keys that an option sets, including inherited ones, with their values."""
    file = options(group)[option]
    content, keys = read(file), dict[str, Any]()
    for sibling in content.get("defaults") or []:
        if isinstance(sibling, str) and sibling != "_self_":
            keys |= option_keys(group, sibling)
    own = {key: value for key, value in content.items() if key not in ("defaults", "hydra")}
    return keys | flatten(own, "" if file.read_text(encoding="utf-8").startswith(GLOBAL) else f"{group}.")


def default_choices(root: str) -> dict[str, list[str]]:
    """Return the options that a root config such as `config` or `evaluate` chooses, by group; [] for none."""
    items = [item for item in read(CONF / f"{root}.yaml").get("defaults") or [] if isinstance(item, dict)]
    pairs = [(group, option) for item in items for group, option in item.items()]
    return {
        group: option if isinstance(option, list) else [option] * (option is not None)
        for group, option in pairs
        if not group.startswith("override ") and "@" not in group
    }


def root_keys(root: str) -> dict[str, Any]:
    """Return the keys that a root config sets outside of groups, with their values."""
    content = read(CONF / f"{root}.yaml")
    return flatten({key: value for key, value in content.items() if key not in ("defaults", "hydra")})


def sweeper_of(sweep: str) -> str | None:
    """Return the sweeper that a named sweep chooses by `override /hydra/sweeper`, itself or by inheritance, or None."""
    file, found = options(SWEEPS).get(sweep), None
    for item in (read(file).get("defaults") or []) if file else []:
        if isinstance(item, dict) and "override /hydra/sweeper" in item:
            return str(item["override /hydra/sweeper"])
        if isinstance(item, str) and item not in ("_self_", sweep):
            found = sweeper_of(item)  # of a sweep that this one inherits
    return found


def first_comment(file: Path) -> list[str]:
    """Return the comment lines at the top of a YAML file, which describe it, without the `@package` line."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if line != GLOBAL:
            lines.append(line.lstrip("# ").rstrip())
    return lines


def split_arm(line: str) -> list[str]:
    """Return the overrides in the line of an arm; blanks within a value, as in `tag(log, interval(1, 2))`, stay."""
    return [part for part in _BEFORE_OVERRIDE.split(line.strip()) if part]


def read(file: Path) -> dict[str, Any]:
    """Return the keys of a YAML file of conf/; `ConfigError` if it is not such a file."""
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader) or {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold keys and values")
    return content


def _another(folder: Path, own: Path) -> list[Path]:
    return [folder] if folder.is_dir() and not folder.samefile(own) else []
