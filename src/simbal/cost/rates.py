"""Measured rates of training, benchmarks/rates.yaml, a table that points to where its numbers are from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from simbal.cost.hardware import Hardware
from simbal.cost.recipe import Recipe

TABLE = Path(__file__).parents[3] / "benchmarks" / "rates.yaml"


@dataclass(frozen=True)
class Rate:
    """A rate of training in tokens per second, and how it is known."""

    tokens_per_second: float  # of all devices together
    basis: str
    measured: bool


def rows() -> list[dict[str, Any]]:
    """Return the rows of the table, as checked in."""
    content: list[dict[str, Any]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return content


def measured_rate(recipe: Recipe, micro_batch: int, backend: str, hardware: Hardware, gpus: int) -> Rate | None:
    """Return the rate of a row that has measured this training on such a device; None if there is none.

    A row of as many devices counts first. For another number, the rate is taken to grow with the devices.
    """
    wanted = {
        "device": hardware.device, "model": recipe.model, "vocab_size": recipe.shape.vocab_size,
        "seq_len": recipe.seq_len, "micro_batch": micro_batch, "precision": recipe.precision, "backend": backend,
    }  # fmt: skip
    fitting = [(n, row) for n, row in enumerate(rows(), 1) if wanted.items() <= row.items()]
    if not fitting:
        return None
    number, row = min(fitting, key=lambda found: abs(found[1]["devices"] - gpus))
    source = f'measured: row {number} of benchmarks/{TABLE.name} (RESULTS.md, "{row["source"]}", {row["date"]})'
    if row["devices"] == gpus:
        return Rate(row["tokens_per_second"], source, measured=True)
    scaled = row["tokens_per_second"] * gpus / row["devices"]
    return Rate(scaled, f"{source} with {row['devices']}; assumed: grows with the devices", measured=False)


def assumed_rate(training_flops: int, tokens: int, peak: float, gpus: int, utilisation: float) -> Rate:
    """Return the rate of devices that reach the share `utilisation` of `peak` FLOP/s each, communication included."""
    rate = gpus * peak * utilisation * tokens / training_flops
    return Rate(rate, f"assumed: {utilisation:.0%} of {gpus} x {peak / 1e12:,.4g} TFLOP/s", measured=False)
