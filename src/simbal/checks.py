"""Checks of single values that a user gave; no torch here."""

import sys
from collections.abc import Sequence
from typing import Any

from simbal.errors import UserError


def not_negative(key: str, value: Any) -> float:
    """`value` as a float; `UserError` unless it is a finite number of at least 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= sys.float_info.max:
        raise UserError(f"{key}={value} must be a finite number of at least 0")
    return float(value)


def one_of(key: str, value: Any, allowed: Sequence[str]) -> str:
    """`value`; `UserError` unless it is one of `allowed`."""
    if value not in allowed:
        raise UserError(f"{key}={value} is not one of {', '.join(allowed)}")
    return str(value)


def whole_number(key: str, value: Any, least: int) -> int:
    """`value`; `UserError` unless it is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{key}={value} must be a whole number of at least {least}")
    return value
