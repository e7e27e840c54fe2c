"""Checks of single values: their type, their bounds, and what no value may be, such as NaN.

Values are judged as they are and never converted: `trainer.progress_bar='false'` is not true, `name=2026_10` is not the
number 202610, and a whole number stays one where a fraction would do, as the hash of a run is over its values.
"""

import difflib
import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from simbal.errors import UserError

LONGEST_NAME = 200  # bytes; file systems take 255
WORDS: dict[Any, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null",
}  # fmt: skip
SHOWN = {None: "null", True: "true", False: "false"}  # as a config has them
SAME = {Union: UnionType, Sequence: list, Mapping: dict}  # in another spelling
CREDENTIALS = re.compile(r"://[^/?#\s]*@|[?&;][^=&;]*(?:pass|secret|token|sig|credential|key)[^=&;]*=", re.I)
NO_TEXT = re.compile("[\0\ud800-\udfff]")
NO_NAME = re.compile(r"[/\\\x00-\x1f\x7f\ud800-\udfff]")


def require_no_credentials(key: str, address: Any) -> None:
    """Raise `UserError` for a URL, or a list with a URL, that has a user name, a password or a token in it."""
    for url in address if isinstance(address, list) else [address]:
        if isinstance(url, str) and CREDENTIALS.search(url):
            raise UserError(
                f"{key} has a user name, a password or a token in its URL, and configs are saved: give it in the "
                "environment (PGUSER and PGPASSWORD, AWS_ACCESS_KEY_ID, HF_TOKEN, MLFLOW_TRACKING_USERNAME) or ~/.netrc"
            )


def not_negative(key: str, value: Any) -> float:
    """Return `value` as a float; `UserError` unless it is a finite number of at least 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= sys.float_info.max:
        raise UserError(f"{key}={value} must be a finite number of at least 0")
    return float(value)


def share(key: str, value: float) -> float:
    """Return `value`; `UserError` unless it is at least 0 and below 1."""
    if not 0 <= value < 1:
        raise UserError(f"{key}={value} must be at least 0 and below 1")
    return value


def one_of(key: str, value: Any, allowed: Sequence[str]) -> str:
    """Return `value`; `UserError` unless it is one of `allowed`."""
    if value not in allowed:
        raise UserError(f"{key}={value} is not one of {', '.join(allowed)}")
    return str(value)


def whole_number(key: str, value: Any, least: int, most: int | None = None) -> int:
    """Return `value`; `UserError` unless it is a whole number of at least `least` and, if given, at most `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{key}={value} must be a whole number of at least {least}")
    if most is not None and value > most:
        raise UserError(f"{key} must be at most {most}")
    return value


def check_kind(key: str, value: Any, kind: Any) -> None:
    """Raise `UserError` unless `value` is of the type `kind`: a plain one, a `Literal`, a union, a list or a dict."""
    if accepts(value, kind):
        return
    origin, inner = _parts(kind)
    if origin is dict and isinstance(value, dict) and all(isinstance(name, str) for name in value):
        for name, item in value.items():
            check_kind(f"{key}.{name}", item, inner[1])
    value = SHOWN.get(value, value) if isinstance(value, bool | None) else value
    if origin is Literal:
        raise UserError(f"{key}={value} is not {words(kind)}")
    quoted = f"; quoted twice it is text, as in '{key}=\"...\"'" if accepts("", kind) else ""
    raise UserError(f"{key}={value} must be {words(kind)}{quoted or _rewritten(key, value, kind)}")


def _rewritten(key: str, value: Any, kind: Any) -> str:
    """Return how a value is written that is not of its kind by its form alone, or nothing."""
    if isinstance(value, float) and value.is_integer() and accepts(int(value), kind):
        return f": write {key}={int(value)}"
    if isinstance(value, str) and value and accepts([value], kind):
        return f": write {key}=[{value}]"
    return ""


def accepts(value: Any, kind: Any) -> bool:
    """Whether `value` is of the type `kind`; a whole number counts as a number, true and false do not.

    A class that no value of a config can have is not checked here, but by the function that is given the value.
    """
    origin, inner = _parts(kind)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if origin is UnionType:
        return any(accepts(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(accepts(item, inner[0]) for item in value if inner)
    if origin is dict:
        return isinstance(value, dict) and all(
            isinstance(name, str) and accepts(item, inner[1]) for name, item in value.items() if inner
        )
    if isinstance(value, bool) or kind not in WORDS:
        return kind is bool or kind not in WORDS
    return isinstance(value, (int, float) if kind is float else kind)


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    origin = get_origin(kind) or kind
    return SAME.get(origin, origin), get_args(kind)


def words(kind: Any) -> str:
    """Return the name of a type for a sentence, such as `a whole number or null`."""
    origin, inner = _parts(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin is UnionType:
        ordered = sorted(inner, key=lambda one: _parts(one)[0] in (list, dict))  # "or null" would be said of its items
        return " or ".join(map(words, ordered))
    if origin is list:
        return f"a list of values, each {words(inner[0])}" if inner else "a list"
    if origin is dict:
        return f"keys with values, each {words(inner[1])}" if inner and inner[1] is not Any else "keys with values"
    return WORDS.get(kind, "anything")


def check_arguments(
    prefix: str, function: Callable[..., Any], arguments: Mapping[str, Any], given: Collection[str] = ()
) -> None:
    """Raise `UserError` unless `function` takes `arguments`, each of them of the type that its signature says.

    Args:
        prefix: stands before each key in messages, such as `balancing.lbl.`.
        function: the function that will be called; for a class, its constructor.
        arguments: the values by name.
        given: names of further arguments, which the caller of `function` adds to these.
    """
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in given]
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = f"{function.__name__} takes {', '.join(names) or 'no keys'}"
    for name in arguments:
        if name not in names and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            nearest = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise UserError(f"there is no key {prefix}{name}: {takes}{hint}")
    for p in parameters:
        if p.name in names and p.name not in arguments and p.default is p.empty:
            raise UserError(f"{prefix}{p.name} is missing: {takes}")
    hints = _type_hints(function)
    for name, value in arguments.items():
        check_kind(f"{prefix}{name}", value, hints.get(name, Any))


def _type_hints(function: Any) -> dict[str, Any]:
    makes_an_object = isinstance(function, type)
    try:
        return get_type_hints(function.__init__ if makes_an_object else function)
    except NameError:  # of a type that is imported for the type checker alone
        return {}


def check_leaves(config: Any, key: str = "") -> None:
    """Raise `UserError` for NaN, infinity and text that is not UTF-8."""
    for leaf, value in _leaves(config, key):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{leaf}={value} must be a finite number")
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


class Shared(dict[str, Any]):
    """A group of a config that many runs share, unchanged; its hash is that of the object, by which functions keep
    what follows from it.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict of dotted keys; an empty dict stays a value."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def changed(config: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested dicts with new values by dotted key; the parts that stay are shared, not copied."""
    config = dict(config)
    for key, value in values.items():
        *parents, last = key.split(".")
        node = config
        for parent in parents:
            node[parent] = dict(node[parent])
            node = node[parent]
        node[last] = value
    return config


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
