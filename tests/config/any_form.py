"""The config of a run that has a certain key, whatever source of data or logger it belongs to."""

from typing import Any

import yaml

from tests.conftest import CONF
from tests.run_folders import changed


def with_key(plain: dict[str, Any], name: str) -> dict[str, Any]:
    """`plain`, with an option of its group that has the dotted key `name`, `files` before all others."""
    group, _, key = name.partition(".")
    if not key or key in plain[group]:
        return plain
    names = sorted((path.stem for path in (CONF / group).glob("*.yaml")), key=lambda name: (name != "files", name))
    options = [yaml.safe_load((CONF / group / f"{name}.yaml").read_text()) for name in names]
    option = next(option for option in options if key in option)
    return changed(plain, {group: {**option, "files": "corpus.txt"} if "files" in option else option})


def value_at(plain: Any, name: str) -> Any:
    """The value of a dotted key."""
    for part in name.split("."):
        plain = plain[part]
    return plain


def without(plain: dict[str, Any], *names: str) -> dict[str, Any]:
    """A copy of nested dicts less some dotted keys."""
    copy = changed(plain, {})
    for name in names:
        parent, _, last = name.rpartition(".")
        (value_at(copy, parent) if parent else copy).pop(last, None)
    return copy
