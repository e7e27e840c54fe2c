"""What holds for every value of a config: it has its key's type, it is finite, and no name leads out of its folder.

OmegaConf is content with what it could convert: `trainer.progress_bar='false'` would be true, and `name=2026_10` the
number 202610.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from simbal.errors import UserError

LARGEST = 2**53  # of whole numbers: up to here JSON and floats keep them exactly
LONGEST_NAME = 200  # bytes; file systems take 255
WORDS: dict[Any, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null",
}  # fmt: skip
NO_TEXT = re.compile("[\0\ud800-\udfff]")
NO_NAME = re.compile(r"[/\\\x00-\x1f\x7f\ud800-\udfff]")


def check_kinds(config: Any, schema: Any, prefix: str = "") -> None:
    """Raise `UserError` unless `config` has every key of the dataclass `schema`, with a value of the key's type."""
    if not isinstance(config, dict):
        raise UserError(f"{prefix.removesuffix('.')}={config} must be keys with values")
    for field in fields(schema):
        key = f"{prefix}{field.name}"
        if field.name not in config:
            raise UserError(f"{key} is missing: leave out what deletes it")
        value = config[field.name]
        if is_dataclass(field.type):
            check_kinds(value, field.type, f"{key}.")
        elif not _accepts(value, field.type):
            quoted = f"; quoted twice it is text, as in '{key}=\"...\"'" if "text" in _words(field.type) else ""
            raise UserError(f"{key}={value} must be {_words(field.type)}{quoted}")


def check_leaves(config: Any, key: str = "") -> None:
    """Raise `UserError` for NaN and infinity, for whole numbers too large to be exact, and for what is no text."""
    for leaf, value in _leaves(config, key):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{leaf}={value} must be a finite number")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise UserError(f"{leaf} must lie between -2^53 and 2^53, not {'below' if value < 0 else 'above'}")
        if isinstance(value, str) and NO_TEXT.search(value):
            raise UserError(f"{leaf}={value!r} must be UTF-8 text without a zero byte")


def check_name(key: str, name: Any) -> None:
    """Raise `UserError` unless `name` can be the name of one folder or file, and of no other place."""
    plain = isinstance(name, str) and name and not name.startswith(".") and not NO_NAME.search(name)
    if not plain or len(name.encode()) > LONGEST_NAME:
        shown = name if isinstance(name, str) and name.isprintable() and len(name) <= LONGEST_NAME else repr(name)[:60]
        raise UserError(
            f"{key}={shown} must be a plain name: no slash or backslash, no dot at its start, at most "
            f"{LONGEST_NAME} bytes"
        )


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield key, name
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, key)
    else:
        yield key, value


def _accepts(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_accepts(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(_accepts(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            isinstance(name, str) and _accepts(item, inner[1]) for name, item in value.items()
        )
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _words(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return " or ".join(map(_words, inner))
    if origin is list:
        return f"a list of values, each {_words(inner[0])}"
    if origin is dict:
        return f"keys with values, each {_words(inner[1])}" if inner[1] is not Any else "keys with values"
    return WORDS[kind]
