"""The experts in C on a CPU: gather, gate and up, SwiGLU, down and weighted sum in one call, for fp32.

The equations are in `simbal/native/kernels.c`.
Shapes: N tokens, D model width, E experts, F expert hidden width, K experts per token, R routed rows.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from simbal.experts.backends import RoutingPlan
from simbal.native import library


def native(x_ND: Tensor, plan: RoutingPlan, w13_E2FD: Tensor, w2_EFD: Tensor) -> Tensor:
    """Compute the experts, (N, D)."""
    y_ND: Tensor = _NativeSwiGLU.apply(x_ND, plan.weights_NK, w13_E2FD, w2_EFD, plan.order_R, plan.ends_E)  # type: ignore[no-untyped-call]
    return y_ND


def unsupported(device: torch.device, dtype: torch.dtype, d_model: int, d_expert: int) -> str | None:
    """Return the reason why `native` cannot run with this device and dtype, or None; it supports all widths."""
    return library.unsupported(device, dtype)


class _NativeSwiGLU(torch.autograd.Function):
    """Autograd function of `native`. It saves x and the gate and up pre-activations."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, p_NK: Tensor, w13: Tensor, w2: Tensor, order: Tensor, ends: Tensor) -> Tensor:
        saved = [tensor.contiguous() for tensor in (x_ND, p_NK.float(), w13, w2, order, ends)]
        (N, K), (E, _, width, D) = p_NK.shape, w13.shape
        padded = -(-width // library.vector_width()) * library.vector_width()
        gate_up_R2F, y_ND = x_ND.new_empty(len(order), 2 * padded), x_ND.new_empty(N, D)
        library.call("experts_forward", *saved, gate_up_R2F, y_ND, N, K, E, width, D)
        ctx.save_for_backward(*saved, gate_up_R2F)
        ctx.dtype = p_NK.dtype
        return y_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, p_NK, w13, w2, *_ = saved = ctx.saved_tensors
        (N, K), (E, _, width, D) = p_NK.shape, w13.shape
        gradients = [torch.empty_like(tensor) for tensor in (x_ND, p_NK, w13, w2)]
        library.call("experts_backward", dy_ND.contiguous(), *saved, *gradients, N, K, E, width, D)
        dx, dp, dw13, dw2 = gradients
        return dx, dp.to(ctx.dtype), dw13, dw2, None, None
