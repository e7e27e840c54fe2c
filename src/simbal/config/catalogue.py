"""The catalogue of conf/: its groups, their options and the keys of each, read straight from the YAML files.

Nothing is composed or imported, so that the command line is checked and explained in a fraction of a second.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from simbal.config.values import accepts, flatten, words
from simbal.errors import UserError

CONF = (Path(__file__).parents[1] / "conf").resolve()  # in a checkout a link to conf/, which lies beside src/
SWEEPS = "sweeps"  # the group of named sweeps; a root without it makes one run at a time
MISSING = "???"  # stands in a defaults list where the user must choose
_PACKAGE = re.compile(r"#\s*@package\s+(\S+)")
_BEFORE_OVERRIDE = re.compile(r"\s+(?=~|\+*[\w./@]+=)")


class Catalogue:
    """A root config, and the options of the groups that it chooses among."""

    def __init__(self, folders: Sequence[Path], root: str = "config", sweeps: Sequence[Path] = ()) -> None:
        """List the options; the first folder that has a file wins, as in Hydra's search path.

        Args:
            folders: each is like `CONF`.
            root: the root config, whose defaults list has the groups.
            sweeps: folders of named sweeps beside those of `folders`.

        Raises:
            UserError: there is no root config, or a file would never be read, as another one has its name.
        """
        self.folders = folders
        self.root = root
        self.options: dict[str, dict[str, Path]] = {}
        groups = self.default_choices()
        files = [file for folder in folders for file in sorted(folder.glob("*/*.yaml"))]
        files += [file for folder in sweeps for file in sorted(folder.glob("*.yaml"))]
        for file in files:
            if (group := file.parent.name) in groups:
                first = self.options.setdefault(group, {}).setdefault(file.stem, file)
                _require_same(first, file)

    def root_file(self, name: str) -> Path:
        """Return the file of a root config; `UserError` if there is none, or another one of this name."""
        found = [file for folder in self.folders if (file := folder / f"{name}.yaml").is_file()]
        if not found:
            raise UserError(f"there is no {name}.yaml in {' or '.join(map(str, self.folders))}")
        for file in found:
            _require_same(found[0], file)
        return found[0]

    def root_keys(self) -> dict[str, Any]:
        """Return the dotted keys that belong to no group, with their values."""
        return {key: value for content in self._root_contents() for key, value in _settings(content).items()}

    def default_choices(self) -> dict[str, list[str]]:
        """Return the options that the root config chooses, by group."""
        return {group: options for content in self._root_contents() for group, options in _choices(content).items()}

    def option_keys(self, group: str, option: str) -> dict[str, Any]:
        """Return the dotted keys that an option of a group brings, inherited ones included, with their values."""
        contents = self._contents(group, option)
        return {key: value for content, prefix in contents for key, value in _settings(content, prefix).items()}

    def keys(self, choices: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Return the dotted keys of the root config and of the options chosen by group, with their values."""
        keys = self.root_keys()
        for group, options in choices.items():
            for option in options if group != SWEEPS else ():
                keys |= self.option_keys(group, option)
        return keys

    def parts(self, group: str, option: str) -> list[str]:
        """Return the names of an option's parts, as those of `balancing` have them, the inherited ones first."""
        return [name for content, _ in self._contents(group, option) for name in content if name != "defaults"]

    def targets(self, group: str, option: str) -> dict[str, str]:
        """Return the class (`_target_`) of each part of an option, by the part's name."""
        contents = [content for content, _ in self._contents(group, option)]
        return {name: keys["_target_"] for content in contents for name, keys in content.items() if name != "defaults"}

    def _root_contents(self) -> list[dict[str, Any]]:
        """Return the contents of the root configs that this one inherits, and then its own."""
        content = read(self.root_file(self.root))
        return [*(read(self.root_file(name)) for name in inherited(content)), content]

    def _contents(self, group: str, option: str, heirs: Sequence[str] = ()) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the content of an option's file and what stands before its keys; of those that it inherits first."""
        file, heirs = self.options[group][option], [*heirs, option]
        content = read(file)
        for sibling in inherited(content):
            there = [name for name in self.options[group] if name not in heirs]
            if sibling not in there:
                raise UserError(f"{file}: defaults cannot name {sibling}; there is {', '.join(there)}")
            yield from self._contents(group, sibling, heirs)
        package = _PACKAGE.match(file.read_text(encoding="utf-8"))
        prefix = package[1] if package else group
        if group == SWEEPS and prefix != "_global_":
            raise UserError(f"{file} must begin with the line # @package _global_, as its keys are of the whole config")
        yield content, "" if prefix == "_global_" else f"{prefix}."

    def sweep_choices(self, sweep: str) -> dict[str, list[str]]:
        """Return the options that a named sweep sets by `override /group: option`, by group."""
        contents = [content for content, _ in self._contents(SWEEPS, sweep)]
        return {group: options for content in contents for group, options in _choices(content).items()}

    def sweeper(self, sweep: str) -> tuple[str | None, dict[str, Any]]:
        """Return the sweeper that a named sweep chooses, or None, and what the sweep sets of `hydra.sweeper`."""
        chosen, keys = None, dict[str, Any]()
        for content, _ in self._contents(SWEEPS, sweep):
            defaults = [item for item in content.get("defaults") or [] if isinstance(item, dict)]
            named = [option for item in defaults for key, option in item.items() if key.endswith("/hydra/sweeper")]
            chosen = [chosen, *named][-1]
            own = _of_sweeper(content, f"sweeps={sweep}")
            params = (keys.get("params") or {}) | (own.get("params") or {})
            keys |= own | ({"params": params} if params else {})
        return chosen, keys


def conf_here() -> list[Path]:
    """Return conf/ of the current folder, whose options add to those of `CONF`; nothing if it is that or not there."""
    return _another(Path("conf"), CONF)


def sweeps_here() -> list[Path]:
    """Return sweeps/ of the current folder, whose named sweeps add to those of `CONF`; or nothing, as above."""
    return _another(Path(SWEEPS), CONF / SWEEPS)


def options(group: str) -> dict[str, Path]:
    """Return the files of a group by the options' names, in alphabetical order; those of the current folder last."""
    files: dict[str, Path] = {}
    for folder in [CONF, *conf_here()]:
        for file in sorted((folder / group).glob("*.yaml")):
            files.setdefault(file.stem, file)
    return files


def first_comment(file: Path) -> list[str]:
    """Return the comment lines at the top of a YAML file, which say what it is for, without the `@package` line."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not _PACKAGE.match(line):
            lines.append(line.lstrip("# ").rstrip())
    return lines


def split_arm(line: str) -> list[str]:
    """Return the overrides in the line of an arm; blanks within a value, as in `tag(log, interval(1, 2))`, stay."""
    return [part for part in _BEFORE_OVERRIDE.split(line.strip()) if part]


def _another(folder: Path, own: Path) -> list[Path]:
    return [folder] if folder.is_dir() and not folder.samefile(own) else []


def _require_same(first: Path, file: Path) -> None:
    """Raise `UserError` for a file that another one of the same name hides, unless they say the same."""
    if file is not first and file.read_bytes() != first.read_bytes():
        raise UserError(f"{file} is never read, as {first} has its name: give it another name")


def read(file: Path) -> dict[str, Any]:
    """Return the keys of a YAML file of conf/; `UserError` if it is no such file."""
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold keys and values")
    if not accepts(content.get("defaults") or [], list[str | dict[str, Any]]):
        raise UserError(f"{file}: defaults must be a list such as [simbal]")
    return content


def _of_sweeper(content: dict[str, Any], sweep: str) -> dict[str, Any]:
    """Return what the file of a named sweep sets of `hydra.sweeper`; `UserError` unless it has the shape of that."""
    for key in ("hydra", "hydra.sweeper"):
        content = content.get(key.removeprefix("hydra.")) or {}
        if not isinstance(content, dict):
            raise UserError(f"{sweep}: {key} must be keys with values")
    for key, kind in (("params", dict), ("arms", list[str])):
        if content.get(key) and not accepts(content[key], kind):
            raise UserError(f"{sweep}: hydra.sweeper.{key} must be {words(kind)}")
    return content


def _settings(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    own = {key: value for key, value in content.items() if key not in ("defaults", "hydra")}
    return {key: value for key, value in flatten(own, prefix).items() if not key.endswith("._target_")}


def inherited(content: dict[str, Any]) -> Iterable[str]:
    """Return the names in a defaults list that stand alone: configs beside this one, which it inherits."""
    return [item for item in content.get("defaults") or [] if isinstance(item, str) and item != "_self_"]


def _choices(content: dict[str, Any]) -> dict[str, list[str]]:
    """Return the `group: option` pairs in a defaults list that a user may choose.

    Those are not Hydra's own, and none with a package, such as `optim@_global_.optim: null`: presets choose these.
    """
    choices = {}
    for item in content.get("defaults") or []:
        if isinstance(item, dict):
            for key, option in item.items():
                group = key.removeprefix("override").strip().lstrip("/")
                if not group.startswith("hydra/") and "@" not in group:
                    names = option if isinstance(option, list) else [option]
                    choices[group] = [str(name) for name in names if name is not None]
    return choices
