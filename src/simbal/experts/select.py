"""The choice of the expert backend: a named one runs or is refused, `auto` takes the one measured to be fastest.

Shapes: N tokens, D model width, E experts, F expert hidden width.
"""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from simbal.errors import UserError
from simbal.experts import backends, fused, megablocks
from simbal.experts.backends import Biases
from simbal.experts.dispatch import RoutingPlan
from simbal.experts.megablocks_ops import install

ExpertsFn = Callable[[Tensor, RoutingPlan, Tensor, Tensor], Tensor]
"""(x_ND, plan, w13_E2FD, w2_EFD) -> y_ND: gate is w13[:, 0], up is w13[:, 1], applied as x W^T; down is h @ w2[e]."""
UnsupportedFn = Callable[[torch.device, torch.dtype, int, int], str | None]
LIBRARIES = {"megablocks": ("megablocks", "stanford-stk", "triton"), "fused": ("triton",)}


@dataclass(frozen=True)
class Backend:
    """An implementation of the experts.

    `unsupported(device, dtype, d_model, d_expert)` says why `run` cannot run there, or None.
    """

    run: ExpertsFn
    unsupported: UnsupportedFn


@dataclass(frozen=True)
class Choice:
    """A backend that can run, and the reason for choosing it."""

    name: str
    reason: str

    @property
    def described(self) -> dict[str, str]:
        """The entry of the run record: the reason, and the version of each library that computes.

        `megablocks_ops` is `torch` or `compiled`.
        """
        ops = {"megablocks_ops": install()} if self.name == "megablocks" else {}
        versions = {library: importlib.metadata.version(library) for library in LIBRARIES.get(self.name, ())}
        return {"reason": self.reason} | ops | versions


@dataclass(frozen=True)
class Row:
    """A measured row: the fastest backend for a device, a dtype and widths (None: any); the first that fits counts."""

    device: str
    dtype: torch.dtype
    d_model: int | None
    d_expert: int | None
    backend: str
    measurement: str

    def fits(self, device: str, dtype: torch.dtype, d_model: int, d_expert: int) -> bool:
        """Whether the row applies to this device, dtype and these widths."""
        fits = self.d_model in (None, d_model) and self.d_expert in (None, d_expert)
        return fits and (self.device, self.dtype) == (device, dtype)


TABLE = (
    Row(
        "cpu", torch.float32, None, None, "torch",
        "as fast as reference within 8%, with a third of its activations",
    ),  # forward and backward on one thread, median of 8, balanced and skewed: 15.9 and 14.5 ms to 15.6 and 15.5 at
    # D 128, F 64, E 16, N 1024; 165 and 155 to 152 and 155 at D 256, F 256, E 32, N 2048 (torch 2.13, November 2026)
    Row("cuda", torch.bfloat16, 768, 768, "fused", "1.6 times as fast as torch and 2.9 times megablocks on an H200"),
    Row("cuda", torch.bfloat16, 1536, 1536, "fused", "1.2 times as fast as torch and 1.9 times megablocks on an H200"),
)  # fmt: skip
UNMEASURED = {"cuda": ("fused", "torch", "megablocks", "reference"), "cpu": ("torch", "reference")}
"""The backends to try by device, in this order, where no row fits or its backend cannot run."""


BACKENDS = {
    "reference": Backend(backends.reference, lambda *_: None),
    "torch": Backend(backends.grouped, backends.unsupported),
    "megablocks": Backend(megablocks.megablocks, megablocks.unsupported),
    "fused": Backend(fused.fused, fused.unsupported),
}


def choose(
    name: str, device: torch.device, dtype: torch.dtype, d_model: int, d_expert: int, bias: bool = False
) -> Choice:
    """Return the backend to use and the reason, as they are written into the run record.

    Raises:
        UserError: `name` is unknown, or cannot run with this device, dtype and these widths, or has no biases.
    """
    if bias and name == "auto":
        return Choice("reference", "auto chose reference: it alone has the biases of model.bias=true")
    if bias and name in BACKENDS.keys() - {"reference"}:
        raise UserError(f"experts.backend={name} has no biases, as model.bias=true wants: use experts=reference")
    if name == "auto":
        return _automatic(device, dtype, d_model, d_expert)
    if name not in BACKENDS:
        raise UserError(f"experts.backend={name} is not one of auto, {', '.join(BACKENDS)}")
    if reason := BACKENDS[name].unsupported(device, dtype, d_model, d_expert):
        raise UserError(f"experts.backend={name} cannot run here: {reason}")
    return Choice(name, f"{name}, as experts.backend says")


def apply_experts(
    name: str, x_ND: Tensor, plan: RoutingPlan, w13_E2FD: Tensor, w2_EFD: Tensor, biases: Biases | None = None
) -> Tensor:
    """Run the backend `name` in the compute dtype, with autocast off: grouped_mm is not registered with it.

    Biases are for `reference` alone.
    """
    device = x_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
    with torch.autocast(device, enabled=False):
        operands = x_ND.to(dtype), plan, w13_E2FD.to(dtype), w2_EFD.to(dtype)
        if biases is None:
            return BACKENDS[name].run(*operands)
        assert name == "reference", "`choose` refuses the others"
        b13_E2F, b2_ED = biases
        return backends.reference(*operands, (b13_E2F.to(dtype), b2_ED.to(dtype)))


def _automatic(device: torch.device, dtype: torch.dtype, d_model: int, d_expert: int) -> Choice:
    """Choose the first backend that can run: the measured one, then the defaults of the device.

    The reason names those that cannot. `reference` runs everywhere, so there is always one.
    """
    rows = (row for row in TABLE if row.fits(device.type, dtype, d_model, d_expert))
    candidates = [(row.backend, f"measured {row.measurement}") for row in rows][:1]
    default = f"the default on {device.type}, where nothing is measured for {dtype} and these widths"
    candidates += [(name, default) for name in UNMEASURED.get(device.type, ("reference",))]
    passed_over: dict[str, str] = {}
    for name, why in candidates:
        if not (reason := BACKENDS[name].unsupported(device, dtype, d_model, d_expert)):
            skipped = "; ".join(f"{other} cannot run here: {said}" for other, said in passed_over.items())
            return Choice(name, f"auto chose {name}: {skipped or why}")
        passed_over[name] = reason
    raise AssertionError("reference is the last of every list")
