"""Choice of the expert backend: a named backend runs or raises, `auto` takes the fastest measured backend.

Shapes: N tokens, D model width, E experts, F expert hidden width.
"""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from simbal.errors import UserError
from simbal.experts import backends, fused, megablocks, native
from simbal.experts.backends import Biases, RoutingPlan
from simbal.native import library

LIBRARIES = {"megablocks": ("megablocks", "stanford-stk", "triton"), "fused": ("triton",)}


@dataclass(frozen=True)
class Backend:
    """An implementation of the experts.

    `run(x_ND, plan, w13_E2FD, w2_EFD)` returns y_ND. Gate is w13[:, 0] and up is w13[:, 1], applied as x W^T; down is
    h @ w2[e]. `unsupported(device, dtype, d_model, d_expert)` returns the reason why `run` cannot run, or None.
    """

    run: Callable[[Tensor, RoutingPlan, Tensor, Tensor], Tensor]
    unsupported: Callable[[torch.device, torch.dtype, int, int], str | None]


BACKENDS = {
    "reference": Backend(backends.reference, lambda *_: None),
    "torch": Backend(backends.grouped, backends.unsupported),
    "native": Backend(native.native, native.unsupported),
    "megablocks": Backend(megablocks.megablocks, megablocks.unsupported),
    "fused": Backend(fused.fused, fused.unsupported),
}


@dataclass(frozen=True)
class BackendChoice:
    """A backend that can run, and the reason for choosing it."""

    name: str
    reason: str

    @property
    def described(self) -> dict[str, str]:
        """The entry of the run record: the reason, and the version of each library that the backend uses."""
        versions = {library: importlib.metadata.version(library) for library in LIBRARIES.get(self.name, ())}
        return {"reason": self.reason} | versions


# The fastest measured backend and the result, by device, dtype and widths (d_model, d_expert); None: any widths.
# CPU: native experts take 0.53 of torch's time at D 64, F 64, E 64, K 2, N 1024, 0.56 at D 128, F 64, E 16, K 4, N 1024
# and 0.71 at D 256, F 128, E 32, K 4, N 2048 (forward and backward on one thread, balanced routing, Intel Xeon with
# AVX-512, torch 2.13, November 2026), and steps with AVX2 gain as much. torch is as fast as reference within 8%.
MEASURED = {
    ("cpu", torch.float32, None): ("native", "1.4 to 1.9 times as fast as torch"),
    ("cuda", torch.bfloat16, (768, 768)): (
        "fused", "1.6 times as fast as torch and 2.9 times as fast as megablocks on an H200",
    ),
    ("cuda", torch.bfloat16, (1536, 1536)): (
        "fused", "1.2 times as fast as torch and 1.9 times as fast as megablocks on an H200",
    ),
}  # fmt: skip
# backends to try, by device and in this order, if no measurement applies or the measured backend cannot run
UNMEASURED = {"cuda": ("fused", "torch", "megablocks", "reference"), "cpu": ("torch", "reference")}


def select_backend(
    name: str, device: torch.device, dtype: torch.dtype, d_model: int, d_expert: int, bias: bool = False
) -> BackendChoice:
    """Return the backend to use and the reason.

    Raises:
        UserError: `name` is unknown, cannot run with this device, dtype and widths, or does not support biases.
    """
    if bias and name == "auto":
        return BackendChoice("reference", "auto chose reference: no other backend supports model.bias=true")
    if bias and name in BACKENDS.keys() - {"reference"}:
        raise UserError(f"experts.backend={name} does not support model.bias=true: use experts=reference")
    if name == "auto":
        return _choose_automatically(device, dtype, d_model, d_expert)
    if name not in BACKENDS:
        raise UserError(f"experts.backend={name} is not one of auto, {', '.join(BACKENDS)}")
    if reason := BACKENDS[name].unsupported(device, dtype, d_model, d_expert):
        raise UserError(f"experts.backend={name} cannot run here: {reason}")
    return BackendChoice(name, f"{name}, set by experts.backend")


def _choose_automatically(device: torch.device, dtype: torch.dtype, d_model: int, d_expert: int) -> BackendChoice:
    """Choose the first backend that can run: the measured backend, then the device's list, which ends in reference.

    The reason names the backends that were skipped, and why.
    """
    candidates = []
    for widths in ((d_model, d_expert), None):
        if measured := MEASURED.get((device.type, dtype, widths)):
            backend, result = measured
            candidates.append((backend, f"measured {result}"))
    default = f"the default on {device.type}, no measurement for {dtype} and these widths"
    candidates += [(name, default) for name in UNMEASURED.get(device.type, ("reference",))]
    rejected: dict[str, str] = {}
    for name, default_reason in candidates:
        if reason := BACKENDS[name].unsupported(device, dtype, d_model, d_expert):
            rejected[name] = f"{name} cannot run here: {reason}"
        elif name == "native" and (reason := library.unmeasured()):
            rejected[name] = reason
        else:
            return BackendChoice(name, f"auto chose {name}: {'; '.join(rejected.values()) or default_reason}")
    raise AssertionError("every list ends in reference, which runs everywhere")


def apply_experts(
    name: str, x_ND: Tensor, plan: RoutingPlan, w13_E2FD: Tensor, w2_EFD: Tensor, biases: Biases | None = None
) -> Tensor:
    """Run the backend `name` in the compute dtype. Autocast is off because grouped_mm does not support it.

    Only `reference` supports biases.
    """
    device = x_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
    with torch.autocast(device, enabled=False):
        operands = x_ND.to(dtype), plan, w13_E2FD.to(dtype), w2_EFD.to(dtype)
        if biases is None:
            return BACKENDS[name].run(*operands)
        assert name == "reference", "`select_backend` rejects biases for other backends"
        b13_E2F, b2_ED = biases
        return backends.reference(*operands, (b13_E2F.to(dtype), b2_ED.to(dtype)))
