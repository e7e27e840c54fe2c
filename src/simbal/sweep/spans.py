"""Inclusive spans of whole numbers: `seed=0-4` means the seeds 0, 1, 2, 3 and 4.

Hydra reads `0-4` as text, so spans are written out before Hydra takes a value apart.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from simbal.errors import UserError

MOST_VALUES = 10_000  # a slip such as 0-1000000000 must not fill the memory
_SPAN = re.compile(r"([0-9]+)-([0-9]+)(?::([0-9]+))?")
_ALMOST = re.compile(r"([0-9]+)(?:-|\.\.+|:|-?to-?)([0-9]*)")  # of other languages, or without its end


def expand(values: str) -> str:
    """Write out the spans in a comma-separated list: `0-2,7` is `0,1,2,7` and `0-8:4` is `0,4,8`.

    Text with quotes or brackets is Hydra's own grammar and comes back as it is.
    """
    if set(values) & set("'\"[](){}"):
        return values
    return ",".join(_expand_one(item) for item in values.split(","))


def parse(lines: Iterable[str], integer_keys: Collection[str], parser: OverridesParser) -> list[Override]:
    """Read `key=value` lines as Hydra does, with the spans given to `integer_keys` written out.

    Raises:
        UserError: for a line that Hydra cannot read and for a span that makes no sense.
    """
    overrides = []
    for line in lines:
        override = _parse_one(line, parser)
        if override.value_type is not None and override.key_or_group in integer_keys:
            values = override.get_value_string()
            try:
                expanded = expand(values)
            except UserError as error:
                raise UserError(f"{line}: {error}") from None
            if expanded != values:
                override = _parse_one(f"{override.get_key_element()}={expanded}", parser)
        overrides.append(override)
    return overrides


@lru_cache(maxsize=1 << 16)
def read(line: str) -> Override:
    """Return one `key=value` as Hydra reads it, cached: it takes a millisecond, and is asked for several times."""
    return OverridesParser.create().parse_overrides([line])[0]


def _expand_one(item: str) -> str:
    span = _SPAN.fullmatch(item.strip())
    if span is None:
        if almost := _ALMOST.fullmatch(item.strip()):
            last = almost[2] or int(almost[1]) + 4
            raise UserError(f"a span is written with its first and last number, such as {almost[1]}-{last}")
        return item
    first, last, step = int(span[1]), int(span[2]), int(span[3] or 1)
    if last < first:
        raise UserError(f"the span {item} counts down: write {last}-{first}")
    if step == 0:
        raise UserError(f"the span {item} has a step of 0: use at least 1")
    values = range(first, last + 1, step)
    if len(values) > MOST_VALUES:
        raise UserError(f"the span {item} stands for {len(values)} values: at most {MOST_VALUES} are allowed")
    return ",".join(map(str, values))


def _parse_one(line: str, parser: OverridesParser) -> Override:
    try:
        return replace(read(line), config_loader=parser.config_loader)
    except HydraException:
        raise UserError(f"{line} {_fault(line)}") from None


def _fault(line: str) -> str:
    """Return what is wrong with a line that Hydra's grammar does not have."""
    if "=" not in line:
        return "has no value: write key=value, such as seed=1 or balancing=lbl"
    if any(line.count(opening) != line.count(closing) for opening, closing in ("[]", "()", "{}")):
        return "has a bracket without its other half: a value with brackets goes into quotes twice: 'key=\"value\"'"
    return """cannot be read: a value with signs like {, ?, ~ or = goes into quotes twice: 'key="value"'"""
