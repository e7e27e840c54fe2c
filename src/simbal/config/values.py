"""Checks of single values, and nested dicts as dotted keys."""

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from simbal.errors import UserError

MAX_NAME_BYTES = 200  # file systems allow 255, and the hash of a run is appended
_CREDENTIALS = re.compile(r"://[^/?#\s]*@|[?&;][^=&;]*(?:pass|secret|token|sig|credential|key)[^=&;]*=", re.I)
_PLAIN_NAME = re.compile(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*")


def require_no_credentials(key: str, address: Any) -> None:
    """Raise `UserError` for a URL, or a list of URLs, with a user name, a password or a token."""
    for url in address if isinstance(address, list) else [address]:
        if isinstance(url, str) and _CREDENTIALS.search(url):
            raise UserError(
                f"{key} has a user name, a password or a token in its URL, and configs are saved: use the environment "
                "(PGUSER and PGPASSWORD, AWS_ACCESS_KEY_ID, HF_TOKEN, MLFLOW_TRACKING_USERNAME) or ~/.netrc"
            )


def check_nonnegative(key: str, value: Any) -> float:
    """Return `value` as a float; `UserError` unless it is a finite number of at least 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= sys.float_info.max:
        raise UserError(f"{key}={value} must be a finite number of at least 0")
    return float(value)


def check_positive(key: str, value: Any) -> float:
    """Return `value` as a float; `UserError` unless it is a finite number above 0."""
    if not check_nonnegative(key, value):
        raise UserError(f"{key}={value} must be above 0")
    return float(value)


def check_fraction(key: str, value: float) -> float:
    """Return `value`; `UserError` unless it is at least 0 and below 1."""
    if not 0 <= value < 1:
        raise UserError(f"{key}={value} must be at least 0 and below 1")
    return value


def check_choice(key: str, value: Any, allowed: Sequence[str]) -> str:
    """Return `value`; `UserError` unless it is in `allowed`."""
    if value not in allowed:
        raise UserError(f"{key}={value} is not one of {', '.join(allowed)}")
    return str(value)


def check_integer(key: str, value: Any, least: int, most: int | None = None) -> int:
    """Return `value`; `UserError` unless it is an integer between `least` and `most`, both included."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{key}={value} must be a whole number of at least {least}")
    if most is not None and value > most:
        raise UserError(f"{key}={value} must be at most {most}")
    return value


def check_name(key: str, name: str) -> None:
    """Raise `UserError` unless `name` is a plain folder name."""
    if not _PLAIN_NAME.fullmatch(name) or len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise UserError(
            f"{key}={ascii(name)[1:-1][:60]} must be a plain name: no slash or backslash, no leading dot, at most "
            f"{MAX_NAME_BYTES} bytes"
        )


def divisors(number: int) -> list[int]:
    """Return all divisors of `number` in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with dotted keys; an empty dict is a value."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def with_values(config: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested dicts with new values by dotted key; unchanged parts are shared."""
    config = dict(config)
    for key, value in values.items():
        *parents, last = key.split(".")
        node = config
        for parent in parents:
            node[parent] = dict(node[parent])
            node = node[parent]
        node[last] = value
    return config
