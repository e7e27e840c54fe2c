"""Reads the config.yaml of many runs fast: what they have in common is parsed once.

The file may come from anybody: it can hold nothing but plain values, and not more of them than a config has. What is
pickled here is what was parsed here.
"""

import math
import pickle
import re
from functools import lru_cache
from typing import Any

import yaml

BLOCK = re.compile(r"^(?=[A-Za-z_])", re.MULTILINE)  # where a key without indentation begins
REFERENCE = re.compile(r"[&*]id\d")  # from one part of a file to another
MOST_VALUES, DEEPEST = 10_000, 20  # of a config; ours have a hundredth of that, and four levels


def parse(text: str) -> dict[str, Any]:
    """The mapping that `text` holds.

    The configs of a thousand runs have few different blocks of lines under their keys without indentation.

    Raises:
        yaml.YAMLError: it is no YAML, or has tags of Python's.
        TypeError, ValueError: it is no mapping, or holds what no config holds: NaN, dates, very many values.
    """
    first, *blocks = BLOCK.split(text)
    if first or not blocks or REFERENCE.search(text):
        return dict(_plain(text))
    whole: dict[str, Any] = {}
    for block in blocks:
        whole |= pickle.loads(_pickled(block))  # each reader gets a copy of its own
    return whole


@lru_cache(maxsize=4096)
def _pickled(block: str) -> bytes:
    return pickle.dumps(_plain(block))


def _plain(text: str) -> Any:
    depth = 0
    for event in yaml.parse(text, yaml.CSafeLoader):  # loading recurses in C without a limit, and would end the process
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
    value = yaml.load(text, yaml.CSafeLoader)
    _count(value, 0, 0)
    return value


def _count(value: Any, counted: int, depth: int) -> int:
    """How many values there are, after `counted`; `ValueError` for what no config holds. Aliases count each time."""
    counted += 1
    if counted > MOST_VALUES or depth > DEEPEST:
        raise ValueError("it holds more than a config")
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else ():
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r} is no text")
        for item in value.values() if isinstance(value, dict) else value:
            counted = _count(item, counted, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number")
    elif not isinstance(value, str | int | float | None):
        raise ValueError(f"{value!r} is no value of a config")
    return counted
