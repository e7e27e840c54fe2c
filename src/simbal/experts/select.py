"""Choice of the expert backend: a named one runs or is refused, `auto` takes the one measured to be the fastest."""

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from simbal.errors import UserError
from simbal.experts import grouped, megablocks
from simbal.experts.measured import TABLE, UNMEASURED
from simbal.experts.megablocks_ops import install
from simbal.experts.plan import RoutingPlan
from simbal.experts.reference import reference

ExpertsFn = Callable[[Tensor, RoutingPlan, Tensor, Tensor], Tensor]
"""(x_ND, plan, w13_E2FD, w2_EFD) -> y_ND: gate is w13[:, 0], up is w13[:, 1], applied as x W^T; down is h @ w2[e]."""
UnsupportedFn = Callable[[torch.device, torch.dtype, int, int], str | None]
LIBRARIES = {"megablocks": ("megablocks", "stanford-stk", "triton"), "fused": ("triton",)}


@dataclass(frozen=True)
class Backend:
    """`unsupported(device, dtype, d_model, d_expert)` says why `run` cannot run there, or None."""

    run: ExpertsFn
    unsupported: UnsupportedFn


@dataclass(frozen=True)
class Choice:
    """A backend that can run, and why it is this one."""

    name: str
    reason: str

    @property
    def described(self) -> dict[str, str]:
        """For the run record, with versions of what computes; `megablocks_ops` is `torch` or `compiled`."""
        ops = {"megablocks_ops": install()} if self.name == "megablocks" else {}
        versions = {library: importlib.metadata.version(library) for library in LIBRARIES.get(self.name, ())}
        return {"reason": self.reason} | ops | versions


def _fused(x_ND: Tensor, plan: RoutingPlan, w13_E2FD: Tensor, w2_EFD: Tensor) -> Tensor:
    y_ND: Tensor = importlib.import_module("simbal.experts.fused").fused(x_ND, plan, w13_E2FD, w2_EFD)
    return y_ND


def _fused_unsupported(device: torch.device, dtype: torch.dtype, d_model: int, d_expert: int) -> str | None:
    reason: str | None = importlib.import_module("simbal.experts.fused").unsupported(device, dtype, d_model, d_expert)
    return reason


BACKENDS = {
    "reference": Backend(reference, lambda *_: None),
    "torch": Backend(grouped.grouped, grouped.unsupported),
    "megablocks": Backend(megablocks.megablocks, megablocks.unsupported),
    "fused": Backend(_fused, _fused_unsupported),
}


def choose(name: str, device: torch.device, dtype: torch.dtype, d_model: int, d_expert: int) -> Choice:
    """The backend to use and the reason, as they are written into the run record.

    Raises:
        UserError: `name` is unknown, or cannot run with this device, dtype and these widths.
    """
    if name == "auto":
        return _automatic(device, dtype, d_model, d_expert)
    if name not in BACKENDS:
        raise UserError(f"experts.backend={name} is not one of auto, {', '.join(BACKENDS)}")
    if reason := BACKENDS[name].unsupported(device, dtype, d_model, d_expert):
        raise UserError(f"experts.backend={name} cannot run here: {reason}")
    return Choice(name, f"{name}, as experts.backend says")


def _automatic(device: torch.device, dtype: torch.dtype, d_model: int, d_expert: int) -> Choice:
    """`reference` runs everywhere, so there is always one; what is passed over says why."""
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


def apply_experts(name: str, x_ND: Tensor, plan: RoutingPlan, w13_E2FD: Tensor, w2_EFD: Tensor) -> Tensor:
    """Run a resolved backend in the compute dtype, with autocast off: grouped_mm is not registered with it."""
    device = x_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
    with torch.autocast(device, enabled=False):
        return BACKENDS[name].run(x_ND.to(dtype), plan, w13_E2FD.to(dtype), w2_EFD.to(dtype))
