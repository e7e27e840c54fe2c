"""The `key=value` arguments of report.py, written as everywhere else."""

from collections.abc import Sequence
from typing import Any

import yaml

from simbal.errors import UserError

KINDS: dict[str, tuple[type, str]] = {
    "baseline": (str, "the balancing that differences are taken from"),
    "columns": (list, "a list such as [ppl,min_pes]"),
    "paper": (bool, "true or false"),
}


def report_keys(lines: Sequence[str]) -> dict[str, Any]:
    """By key; `UserError` for a key that there is not, and for a value of another kind."""
    keys: dict[str, Any] = {}
    for line in lines:
        key, equals, text = line.partition("=")
        if not equals or key not in KINDS:
            raise UserError(f"{line}: give baseline=..., columns=[...] or paper=true")
        kind, meaning = KINDS[key]
        try:
            keys[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            keys[key] = None
        if not isinstance(keys[key], kind):
            raise UserError(f"{line}: {key} must be {meaning}")
    return keys
