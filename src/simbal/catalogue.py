"""What conf/ offers: its groups, their options and the keys of each, read straight from the YAML files.

Nothing is composed or imported, so that the command line is checked and explained in a fraction of a second.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from simbal.config import flatten
from simbal.errors import UserError
from simbal.sweep.arm_line import split_arm

SWEEPS = "sweeps"  # the group of named sweeps; a root without it makes one run at a time
MISSING = "???"  # stands in a defaults list where the user must choose
_PACKAGE = re.compile(r"#\s*@package\s+(\S+)")


class Catalogue:
    """A root config, and the options of the groups that it chooses among."""

    def __init__(self, folders: Sequence[Path], root: str = "config") -> None:
        """List the options; the first of `folders` that has a file wins, as in Hydra's search path."""
        self.folders = folders
        self.root = root
        self.options: dict[str, dict[str, Path]] = {}
        groups = self.default_choices()
        for folder in folders:
            for file in sorted(folder.glob("*/*.yaml")):
                if file.parent.name in groups:
                    self.options.setdefault(file.parent.name, {}).setdefault(file.stem, file)

    def root_file(self, name: str) -> Path:
        """The file of a root config; `UserError` if there is none."""
        for folder in self.folders:
            if (file := folder / f"{name}.yaml").is_file():
                return file
        raise UserError(f"there is no {name}.yaml in {' or '.join(map(str, self.folders))}")

    def root_keys(self) -> dict[str, Any]:
        """Dotted keys that belong to no group, with their values."""
        keys: dict[str, Any] = {}
        for name in _inherited(_read(self.root_file(self.root))):
            keys |= _settings(_read(self.root_file(name)))
        return keys | _settings(_read(self.root_file(self.root)))

    def default_choices(self) -> dict[str, list[str]]:
        """The options that the root config chooses in each group."""
        content = _read(self.root_file(self.root))
        choices: dict[str, list[str]] = {}
        for name in _inherited(content):
            choices |= _choices(_read(self.root_file(name)))
        return choices | _choices(content)

    def option_keys(self, group: str, option: str) -> dict[str, Any]:
        """Dotted keys that an option brings, with their values."""
        file = self.options[group][option]
        content = _read(file)
        keys: dict[str, Any] = {}
        for sibling in _inherited(content):
            keys |= self.option_keys(group, sibling)
        package = _PACKAGE.match(file.read_text(encoding="utf-8"))
        prefix = package[1] if package else group
        return keys | _settings(content, "" if prefix == "_global_" else f"{prefix}.")

    def parts(self, group: str, option: str) -> list[str]:
        """What an option of a group like `balancing` is made of: its own keys and those of the options it inherits."""
        content = _read(self.options[group][option])
        inherited = [part for sibling in _inherited(content) for part in self.parts(group, sibling)]
        return [*inherited, *(key for key in content if key != "defaults")]

    def sweep_choices(self, sweep: str) -> dict[str, list[str]]:
        """The options that a named sweep sets by `override /group: option`."""
        return _choices(_read(self.options[SWEEPS][sweep]))

    def sweep_lines(self, sweep: str) -> list[str]:
        """A named sweep's grid, and its arms, as `key=value` lines."""
        hydra = _read(self.options[SWEEPS][sweep]).get("hydra") or {}
        sweeper = hydra.get("sweeper") or {}
        params = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
        return params + [line for arm in sweeper.get("arms") or [] for line in split_arm(arm)]

    def sweeper(self, sweep: str) -> tuple[str | None, dict[str, Any]]:
        """The sweeper that a named sweep chooses, if it does, and what it sets of `hydra.sweeper`."""
        content = _read(self.options[SWEEPS][sweep])
        defaults = [item for item in content.get("defaults") or [] if isinstance(item, dict)]
        chosen = [option for item in defaults for key, option in item.items() if key.endswith("/hydra/sweeper")]
        return (chosen or [None])[-1], (content.get("hydra") or {}).get("sweeper") or {}


def first_comment(file: Path) -> list[str]:
    """The comment lines at a YAML file's top, less the `@package` line: what the file says it is for."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not _PACKAGE.match(line):
            lines.append(line.lstrip("# ").rstrip())
    return lines


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold keys and values")
    return content


def _settings(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    own = {key: value for key, value in content.items() if key not in ("defaults", "hydra")}
    return {key: value for key, value in flatten(own, prefix).items() if not key.endswith("._target_")}


def _inherited(content: dict[str, Any]) -> Iterable[str]:
    """Names in a defaults list that stand alone: configs beside this one."""
    return [item for item in content.get("defaults") or [] if isinstance(item, str) and item != "_self_"]


def _choices(content: dict[str, Any]) -> dict[str, list[str]]:
    """`group: option` pairs in a defaults list, less those that are Hydra's own."""
    choices = {}
    for item in content.get("defaults") or []:
        if isinstance(item, dict):
            for key, option in item.items():
                group = key.removeprefix("override").strip().lstrip("/")
                if not group.startswith("hydra/"):
                    choices[group] = [str(name) for name in _as_list(option) if name is not None]
    return choices


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
