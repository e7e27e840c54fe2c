"""Reads JSON that may be cut short, damaged or hostile, into values that can be computed with and written again."""

import json
from typing import Any, NoReturn


def parse(text: str | bytes, thorough: bool = True) -> Any:
    """Return the value of a JSON text.

    Args:
        text: bytes are taken for UTF-8.
        thorough: also refuse numbers that are too large for a float, and lone surrogates, which no file can hold.

    Raises:
        ValueError: it is no JSON, holds NaN or Infinity, or is nested too deeply.
    """
    try:
        value = _DECODER.decode(text.decode() if isinstance(text, bytes) else text)
        if thorough:
            _ENCODER.encode(value).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
