"""Helpers for nested configs with keys of different data sources and loggers."""

from functools import cache
from typing import Any

from simbal.config.options import options, read
from tests.run_folders import changed


@cache
def contents(group: str) -> list[dict[str, Any]]:
    """The files of a group; `files` comes first, as it needs fewest other keys."""
    files = options(group)
    return [read(files[name]) for name in sorted(files, key=lambda name: (name != "files", name))]


def with_key(plain: dict[str, Any], name: str) -> dict[str, Any]:
    """`plain`, with an option of the group that has the dotted key `name`."""
    group, _, key = name.partition(".")
    if not key or key in plain[group]:
        return plain
    option = next(content for content in contents(group) if key in content)
    return changed(plain, {group: {**option, "files": "corpus.txt"} if "files" in option else option})


def value_at(plain: Any, name: str) -> Any:
    """The value of a dotted key."""
    for part in name.split("."):
        plain = plain[part]
    return plain


def without(plain: dict[str, Any], name: str) -> dict[str, Any]:
    """A copy of nested dicts without a dotted key."""
    copy = changed(plain, {})
    parent, _, last = name.rpartition(".")
    (value_at(copy, parent) if parent else copy).pop(last, None)
    return copy
