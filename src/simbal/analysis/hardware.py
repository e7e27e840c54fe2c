"""What a device of conf/hardware can do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simbal.checks import not_negative, one_of
from simbal.config_values import check_kinds
from simbal.errors import UserError

OPTIONS = Path(__file__).parents[3] / "conf" / "hardware"


@dataclass(frozen=True)
class Hardware:
    """One device; each file of conf/hardware says where its numbers are from."""

    device: str  # what it is
    accelerator: str  # cpu | cuda
    bf16_flops: float | None  # peak FLOP/s of dense products; None: it has no bf16
    fp32_flops: float
    memory_bytes: float
    price_per_hour: float  # USD, an assumption

    def peak(self, precision: str) -> float:
        """FLOP/s in the products of a precision of `trainer.precision`; `UserError` if it cannot do them."""
        if precision == "32-true":
            return self.fp32_flops
        if self.bf16_flops is None:
            raise UserError(f"analysis.plan.precision={precision}: {self.device} has no bf16: use 32-true")
        return self.bf16_flops


def hardware_of(keys: Any) -> Hardware:
    """Check the keys of `hardware=NAME`; None, when no name was given, is refused with the names."""
    if keys is None:
        names = ", ".join(sorted(file.stem for file in OPTIONS.glob("*.yaml")))
        raise UserError(f"analysis=plan needs hardware=NAME: there is {names}")
    check_kinds(keys, Hardware, "hardware.")
    one_of("hardware.accelerator", keys["accelerator"], ("cpu", "cuda"))
    not_negative("hardware.price_per_hour", keys["price_per_hour"])
    for key in ("bf16_flops", "fp32_flops", "memory_bytes"):
        if keys[key] is not None and not_negative(f"hardware.{key}", keys[key]) == 0:
            raise UserError(f"hardware.{key}={keys[key]} must be above 0")
    return Hardware(**keys)
