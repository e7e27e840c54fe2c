"""The names that numbers had in files of older versions, and that a user may still type."""

from collections.abc import Mapping
from typing import Any

ALIASES = {
    "load/max_vio": "val/max_vio",
    "load/tokens_per_expert": "val/tokens_per_expert",
    "load/unique_experts": "val/unique_experts",
    "routing/seu": "val/seu",
    "routing/entropy": "val/entropy",
    "router/gram_deviation": "val/gram_deviation",
    "pes": "val/pes",
    "pes/min": "val/min_pes",
    "pes/mean": "val/mean_pes",
    "train/load/max_vio": "train/max_vio",
    "routing.entropy_topk": "routing.entropy",
    "orthogonality.gram_deviation_bf16": "orthogonality.gram_deviation",
}


def current(key: str) -> str:
    """Return today's name of a number."""
    return ALIASES.get(key, key)


def renamed(numbers: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a mapping whose keys, with `prefix` before each, are today's names.

    A number that stands under both names keeps the value of today's.
    """
    if not prefix and ALIASES.keys().isdisjoint(numbers):  # as in most files
        return dict(numbers)
    found = {current(f"{prefix}{key}").removeprefix(prefix): value for key, value in numbers.items()}
    return found | {key: numbers[key] for key in found.keys() & numbers}


def renamed_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of metrics.jsonl, with its values by layer, under today's names."""
    layers = row.get("layers")
    if isinstance(layers, dict):
        row = {**row, "layers": renamed(layers)}
    return renamed(row)


def short_names(key: str) -> set[str]:
    """Return what a user may type for a number: its key or an older one, or the last part of either."""
    keys = {key, *(old for old, new in ALIASES.items() if new == key)}
    return keys | {part.replace(".", "/").rpartition("/")[2] for part in keys}
