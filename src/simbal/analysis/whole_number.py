"""A key of an analysis that must be a whole number."""

from typing import Any

from simbal.errors import UserError


def check_whole_number(key: str, value: Any, least: int) -> None:
    """Raise `UserError` unless `value` is a whole number of at least `least`; `key` is the dotted key of the config."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{key}={value} must be a whole number of at least {least}")
