"""Inclusive spans of integers: `seed=0-4` means the seeds 0, 1, 2, 3 and 4.

Hydra reads `0-4` as text, so spans are expanded before Hydra parses a value.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from simbal.errors import ConfigError

MOST_VALUES = 10_000  # a typo such as 0-1000000000 must not fill the memory
_SPAN = re.compile(r"([0-9]+)-([0-9]+)(?::([0-9]+))?")


def expand(values: str) -> str:
    """Expand the spans in a comma-separated list: `0-2,7` becomes `0,1,2,7`, and `0-8:4` becomes `0,4,8`.

    Text with quotes or brackets is Hydra's own grammar and stays as it is.

    Raises:
        ConfigError: a span counts down, has a step of 0, or stands for too many values.
    """
    if set(values) & set("'\"[](){}"):
        return values
    return ",".join(_expand_one(item) for item in values.split(","))


def parse(lines: Iterable[str], integer_keys: Collection[str], parser: OverridesParser) -> list[Override]:
    """Read `key=value` lines as Hydra does, and expand the spans of `integer_keys`.

    Raises:
        ConfigError: a span makes no sense.
        OverrideParseException: a line is not in Hydra's grammar.
    """
    overrides = []
    for line in lines:
        override = read(line)
        if override.value_type is not None and override.key_or_group in integer_keys:
            values = override.get_value_string()
            if (expanded := expand(values)) != values:
                override = read(f"{override.get_key_element()}={expanded}")
        overrides.append(replace(override, config_loader=parser.config_loader))
    return overrides


@lru_cache(maxsize=1 << 16)
def read(line: str) -> Override:
    """Return one `key=value` as Hydra reads it. Parsing takes a millisecond, so the result is cached."""
    return OverridesParser.create().parse_overrides([line])[0]


def _expand_one(item: str) -> str:
    span = _SPAN.fullmatch(item.strip())
    if span is None:
        return item
    first, last, step = int(span[1]), int(span[2]), int(span[3] or 1)
    if last < first or not step:
        raise ConfigError(f"the span {item} must count up, such as seed={min(first, last)}-{max(first, last)}")
    values = range(first, last + 1, step)
    if len(values) > MOST_VALUES:
        raise ConfigError(f"the span {item} stands for {len(values)} values: at most {MOST_VALUES} are allowed")
    return ",".join(map(str, values))
