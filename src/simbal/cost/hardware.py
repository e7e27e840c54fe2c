"""The devices of conf/hardware, and the rates of training on them: measured, as rates.yaml has them, or assumed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from simbal.config.compose import typed
from simbal.config.options import options
from simbal.config.schema import Group
from simbal.cost.recipe import Recipe
from simbal.errors import UserError

TABLE = Path(__file__).with_name("rates.yaml")


class Hardware(Group):
    """A device; each file of conf/hardware says where its numbers are from."""

    device: str
    accelerator: Literal["cpu", "cuda"]
    bf16_flops: float | None = Field(gt=0)  # peak FLOP/s of dense products; None: it has no bf16
    fp32_flops: float = Field(gt=0)
    memory_bytes: float = Field(gt=0)
    price_per_hour: float = Field(ge=0)  # USD, an assumption

    def peak(self, precision: str) -> float:
        """Return the peak FLOP/s in a precision of `trainer.precision`; `UserError` if the device lacks it."""
        if precision == "32-true":
            return self.fp32_flops
        if self.bf16_flops is None:
            raise UserError(f"analysis.plan.precision={precision}: {self.device} has no bf16: use 32-true")
        return self.bf16_flops


def hardware_of(keys: Any) -> Hardware:
    """Return the checked keys of `hardware=NAME`; None, when no name was given, is refused with the names."""
    if keys is None:
        raise UserError(f"analysis=plan needs hardware=NAME: there is {', '.join(options('hardware'))}")
    return typed(Hardware, keys, "hardware.")


@dataclass(frozen=True)
class Rate:
    """A rate of training in tokens per second, and how it is known."""

    tokens_per_second: float  # of all devices together
    basis: str
    measured: bool


def rows() -> list[dict[str, Any]]:
    """Return the rows of the table, as checked in."""
    return list(yaml.safe_load(TABLE.read_text(encoding="utf-8")))


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
    source = f'measured: row {number} of simbal/cost/{TABLE.name} (RESULTS.md, "{row["source"]}", {row["date"]})'
    if row["devices"] == gpus:
        return Rate(row["tokens_per_second"], source, measured=True)
    scaled = row["tokens_per_second"] * gpus / row["devices"]
    return Rate(scaled, f"{source} with {row['devices']}; assumed: grows with the devices", measured=False)


def assumed_rate(training_flops: int, tokens: int, peak: float, gpus: int, utilisation: float) -> Rate:
    """Return the rate of devices that reach the share `utilisation` of `peak` FLOP/s each, communication included."""
    rate = gpus * peak * utilisation * tokens / training_flops
    return Rate(rate, f"assumed: {utilisation:.0%} of {gpus} x {peak / 1e12:,.4g} TFLOP/s", measured=False)
