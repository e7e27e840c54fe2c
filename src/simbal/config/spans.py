"""Inclusive spans of integers: `seed=0-4` means the seeds 0, 1, 2, 3 and 4.

Hydra reads `0-4` as text, so spans are expanded before Hydra parses a value.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from simbal.config.layers import LAYER_KEYS
from simbal.errors import ConfigError

MAX_VALUES = 10_000  # a typo such as 0-1000000000 must not fill the memory
_LAYER_KEY = re.compile(rf"balancing\.[^.=]+\.({'|'.join(LAYER_KEYS)})=")
_SPAN = re.compile(r"([0-9]+)-([0-9]+)(?::([0-9]+))?")


def parse(lines: Iterable[str], integer_keys: Collection[str], parser: OverridesParser) -> list[Override]:
    """Parse `key=value` lines as Hydra does and expand the spans of `integer_keys`.

    Raises:
        ConfigError: a span is invalid.
        OverrideParseException: a line does not follow Hydra's grammar.
    """
    overrides = []
    for line in lines:
        override = read(line)
        if override.value_type is not None and override.key_or_group in integer_keys:
            override = read(f"{override.get_key_element()}={expand(override.get_value_string())}")
        overrides.append(replace(override, config_loader=parser.config_loader))
    return overrides


@lru_cache(maxsize=1 << 16)
def read(line: str) -> Override:
    """Parse one `key=value` line. Parsing takes a millisecond, so the result is cached.

    The files of strategies do not have the keys that select layers, so the line adds them.
    """
    line = f"++{line}" if _LAYER_KEY.match(line) else line
    return OverridesParser.create().parse_overrides([line])[0]


def expand(values: str) -> str:
    """Expand the spans in a comma-separated list: `0-2,7` becomes `0,1,2,7`, and `0-8:4` becomes `0,4,8`.

    Values with quotes or brackets belong to Hydra's grammar and are returned unchanged.

    Raises:
        ConfigError: a span counts down, has a step of 0, or has more than `MAX_VALUES` values.
    """
    if set(values) & set("'\"[](){}"):
        return values
    return ",".join(map(_expand_span, values.split(",")))


def _expand_span(item: str) -> str:
    span = _SPAN.fullmatch(item.strip())
    if span is None:
        return item
    first, last, step = int(span[1]), int(span[2]), int(span[3] or 1)
    if last < first or not step:
        raise ConfigError(f"the span {item} must count up, such as seed={min(first, last)}-{max(first, last)}")
    values = range(first, last + 1, step)
    if len(values) > MAX_VALUES:
        raise ConfigError(f"the span {item} has {len(values)} values, but at most {MAX_VALUES} are allowed")
    return ",".join(map(str, values))
