"""fp32 matrix products by oneDNN on non-Intel CPUs, where oneDNN is twice as fast as torch's default.

torch multiplies fp32 matrices with Intel's MKL, which uses only 256-bit vectors on other vendors' CPUs: on one AMD core
with AVX-512, MKL reaches 90 GFLOP/s and oneDNN 200 GFLOP/s. torch also contains oneDNN, which detects what the CPU
supports. Both compute in fp32 but add in a different order.
Shapes: M rows, I the dimension summed over, J columns.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def onednn_is_faster() -> bool:
    """Whether torch has both MKL and oneDNN, and the CPU is not from Intel."""
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not both or not hasattr(torch.cpu, "get_capabilities"):  # missing in older versions of torch
        return False
    return "Intel" not in str(torch.cpu.get_capabilities().get("cpu_name", "Intel"))


def onednn_matmul(a_MI: Tensor, b: Tensor) -> bool:
    """Whether `mm` and `linear` use oneDNN for `a_MI` and `b`."""
    return a_MI.is_cpu and a_MI.dtype == b.dtype == torch.float32 and a_MI.numel() > 0 and onednn_is_faster()


def mm(a_MI: Tensor, b_IJ: Tensor) -> Tensor:
    """Return a b, (M, J), without support for gradients."""
    if not onednn_matmul(a_MI, b_IJ):
        return a_MI @ b_IJ
    return _linear(a_MI, b_IJ.T)


def linear(x_MI: Tensor, weight_JI: Tensor) -> Tensor:
    """Return x W^T, (M, J), like `F.linear` without a bias; x may have more leading dimensions."""
    compiling = torch.compiler.is_compiling()  # inductor selects a kernel itself
    if compiling or torch.is_autocast_enabled(x_MI.device.type) or not onednn_matmul(x_MI, weight_JI):
        return F.linear(x_MI, weight_JI)
    product: Tensor = _Linear.apply(x_MI, weight_JI)  # type: ignore[no-untyped-call]
    return product


def _linear(x_MI: Tensor, weight_JI: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x_MI, weight_JI, None, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, weight_JI: Tensor) -> Tensor:
        ctx.save_for_backward(x_MI, weight_JI)
        return _linear(x_MI, weight_JI)

    @staticmethod
    def backward(ctx: Any, dy_MJ: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_MI, weight_JI = ctx.saved_tensors
        needs_dx, needs_dweight = ctx.needs_input_grad
        product: Any = _Linear.apply  # has a second derivative
        dx = product(dy_MJ, weight_JI.T) if needs_dx else None
        dweight = product(dy_MJ.flatten(0, -2).T, x_MI.flatten(0, -2).T) if needs_dweight else None
        return dx, dweight
