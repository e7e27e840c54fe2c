"""Reads the config.yaml of many runs fast: what they have in common is parsed once."""

import pickle
import re
from functools import lru_cache
from typing import Any

import yaml

BLOCK = re.compile(r"^(?=[A-Za-z_])", re.MULTILINE)  # where a key without indentation begins
REFERENCE = re.compile(r"[&*]id\d")  # from one part of a file to another


def parse(text: str) -> dict[str, Any]:
    """The mapping that `text` holds.

    The configs of a thousand runs have few different blocks of lines under their keys without indentation.

    Raises:
        yaml.YAMLError: it is no YAML.
        TypeError, ValueError: it is no mapping.
    """
    first, *blocks = BLOCK.split(text)
    if first or not blocks or REFERENCE.search(text):
        return dict(yaml.load(text, yaml.CSafeLoader))
    whole: dict[str, Any] = {}
    for block in blocks:
        whole |= pickle.loads(_pickled(block))  # each reader gets a copy of its own
    return whole


@lru_cache(maxsize=4096)
def _pickled(block: str) -> bytes:
    return pickle.dumps(yaml.load(block, yaml.CSafeLoader))
