"""Choice of the expert backend: a named one runs or is refused, `auto` takes the first that can run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from simbal.errors import UserError
from simbal.experts import grouped
from simbal.experts.plan import RoutingPlan
from simbal.experts.reference import reference

ExpertsFn = Callable[[Tensor, RoutingPlan, Tensor, Tensor], Tensor]
"""(x_ND, plan, w13_E2FD, w2_EFD) -> y_ND: gate is w13[:, 0], up is w13[:, 1], applied as x W^T; down is h @ w2[e]."""


@dataclass(frozen=True)
class Backend:
    """`unsupported(device, dtype, d_model, d_expert)` says why `run` cannot run there, or None."""

    run: ExpertsFn
    unsupported: Callable[[torch.device, torch.dtype, int, int], str | None]


BACKENDS = {
    "torch": Backend(grouped.grouped, grouped.unsupported),
    "reference": Backend(reference, lambda *_: None),
}  # `auto` tries them in this order


def resolve(name: str, device: torch.device, dtype: torch.dtype, d_model: int, d_expert: int) -> str:
    """The backend to use, as it is written into the run record.

    Raises:
        UserError: `name` is unknown, or cannot run with this device, dtype and these widths.
    """
    if name == "auto":
        return next(n for n, b in BACKENDS.items() if not b.unsupported(device, dtype, d_model, d_expert))
    if name not in BACKENDS:
        raise UserError(f"experts.backend={name} is not one of auto, {', '.join(BACKENDS)}")
    if reason := BACKENDS[name].unsupported(device, dtype, d_model, d_expert):
        raise UserError(f"experts.backend={name} cannot run here: {reason}")
    return name


def apply_experts(name: str, x_ND: Tensor, plan: RoutingPlan, w13_E2FD: Tensor, w2_EFD: Tensor) -> Tensor:
    """Run a resolved backend in the compute dtype, with autocast off: grouped_mm is not registered with it."""
    device = x_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
    with torch.autocast(device, enabled=False):
        return BACKENDS[name].run(x_ND.to(dtype), plan, w13_E2FD.to(dtype), w2_EFD.to(dtype))
