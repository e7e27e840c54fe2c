"""The devices of conf/hardware: their peak rates, memory and price."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from simbal.config.check import typed
from simbal.config.schema import Key
from simbal.errors import UserError

OPTIONS = Path(__file__).parents[3] / "conf" / "hardware"


@dataclass(frozen=True)
class Hardware:
    """A device; each file of conf/hardware says where its numbers are from."""

    device: Annotated[str, Key("what it is")]
    accelerator: Annotated[Literal["cpu", "cuda"], Key("cpu or cuda")]
    bf16_flops: Annotated[float | None, Key("peak FLOP/s of dense products; null: it has no bf16", above=0)]
    fp32_flops: Annotated[float, Key("peak FLOP/s of dense products", above=0)]
    memory_bytes: Annotated[float, Key("", above=0)]
    price_per_hour: Annotated[float, Key("USD, an assumption", least=0)]

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
        names = ", ".join(sorted(file.stem for file in OPTIONS.glob("*.yaml")))
        raise UserError(f"analysis=plan needs hardware=NAME: there is {names}")
    return typed(Hardware, keys, "hardware.")
