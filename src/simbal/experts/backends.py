"""Dispatch of tokens to experts, and the two backends in plain PyTorch.

`reference` loops over the experts. `grouped` (the option `torch`) runs one grouped matrix product for all of them and
saves little for the backward pass.
Reference: MegaBlocks (arXiv 2211.15841) for the weight layout; SonicMoE for the router gradient <h, dy W2^T>, which
needs no expert output.
Shapes: N tokens, D model width, E experts, F expert hidden width, K experts per token, R = N*K routed rows, I and J the
dimensions of a matrix.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Biases = tuple[Tensor, Tensor]  # b13_E2F and b2_ED, added to the products with w13_E2FD and w2_EFD


@dataclass(frozen=True)
class RoutingPlan:
    """The dispatch of a layer's tokens: rows sorted by expert, and where the rows of each expert end.

    Slot `t*K + k` is the k-th choice of token t. Only `weights_NK` carries a gradient.
    """

    weights_NK: Tensor
    order_R: Tensor  # slot of each sorted row; the sort is stable, so an expert's rows keep the order of the tokens
    inverse_R: Tensor  # sorted row of each slot
    ends_E: Tensor  # int32, cumulative; equal to the previous end for an expert without rows

    @classmethod
    def build(cls, experts_NK: Tensor, weights_NK: Tensor, num_experts: int) -> "RoutingPlan":
        """Sort the slots by expert."""
        sorted_R, order_R = torch.sort(experts_NK.reshape(-1), stable=True)
        inverse_R = torch.empty_like(order_R)
        inverse_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
        # bincount would synchronize with the GPU
        experts_E = torch.arange(num_experts, device=order_R.device)
        ends_E = torch.searchsorted(sorted_R, experts_E, right=True).to(torch.int32)
        return cls(weights_NK, order_R, inverse_R, ends_E)

    @property
    def tokens_R(self) -> Tensor:
        """The token of each sorted row, (R,)."""
        return self.order_R // self.weights_NK.shape[1]


def reference(
    x_ND: Tensor, plan: RoutingPlan, w13_E2FD: Tensor, w2_EFD: Tensor, biases: Biases | None = None
) -> Tensor:
    """Compute the experts one after another, (N, D). All backends compute the same function.

    y_t = sum_k p_tk W2_e^T (silu(Wgate_e x_t) * (Wup_e x_t)), where e is the k-th expert of token t. With biases,
    y_t = sum_k p_tk (W2_e^T (silu(Wgate_e x_t + b1_e) * (Wup_e x_t + b3_e)) + b2_e).
    """
    y_ND, tokens_R = torch.zeros_like(x_ND), plan.tokens_R
    p_R = plan.weights_NK.reshape(-1)[plan.order_R].to(x_ND.dtype)
    # unbind once: indexing w[e] would create a zero gradient of the full stack for every expert
    w13, w2 = w13_E2FD.unbind(), w2_EFD.unbind()
    b13, b2 = (b.unbind() for b in biases) if biases else ((), ())
    begin = 0
    for e, end in enumerate(plan.ends_E.tolist()):
        tokens = tokens_R[begin:end]
        gate, up = (x_ND[tokens] @ w_FD.T for w_FD in w13[e])
        if biases:
            gate, up = gate + b13[e][0], up + b13[e][1]
        out = (F.silu(gate) * up) @ w2[e]
        if biases:
            out = out + b2[e]
        y_ND = y_ND.index_add(0, tokens, out * p_R[begin:end, None])
        begin = end
    return y_ND


def grouped(x_ND: Tensor, plan: RoutingPlan, w13_E2FD: Tensor, w2_EFD: Tensor) -> Tensor:
    """Compute the experts, (N, D), with one grouped matrix product per weight."""
    y_ND: Tensor = _GroupedSwiGLU.apply(
        x_ND, plan.weights_NK, w13_E2FD, w2_EFD, plan.order_R, plan.inverse_R, plan.ends_E
    )  # type: ignore[no-untyped-call]
    return y_ND


def unsupported(device: torch.device, dtype: torch.dtype, d_model: int, d_expert: int) -> str | None:
    """Return the reason why `grouped` cannot run with this device, dtype and widths, or None."""
    if dtype == torch.float64:
        return None if device.type == "cpu" else "float64 is supported on the CPU only"
    if device.type == "cuda" and dtype != torch.bfloat16:
        return f"on CUDA it needs bfloat16, not {dtype}: set trainer.precision=bf16-mixed"
    multiple = 16 // dtype.itemsize
    if d_model % multiple or d_expert % multiple:
        return f"model.d_model={d_model} and model.d_expert={d_expert} must be multiples of {multiple} for {dtype}"
    return None


def _matmul(a_RI: Tensor, b_EIJ: Tensor, ends_E: Tensor) -> Tensor:
    if a_RI.dtype == torch.float64:  # grouped_mm does not support float64, which gradcheck needs
        parts = a_RI.tensor_split(ends_E[:-1].tolist())
        return torch.cat([part @ b_IJ for part, b_IJ in zip(parts, b_EIJ, strict=True)])
    return F.grouped_mm(a_RI, b_EIJ, offs=ends_E)


def _weight_gradient(a_RI: Tensor, b_RJ: Tensor, ends_E: Tensor) -> Tensor:
    """Return a_e^T b_e for each expert, (E, I, J); zero for an expert without rows."""
    if a_RI.dtype == torch.float64:
        parts = (x.tensor_split(ends_E[:-1].tolist()) for x in (a_RI, b_RJ))
        return torch.stack([a.T @ b for a, b in zip(*parts, strict=True)])
    return F.grouped_mm(a_RI.T, b_RJ, offs=ends_E)  # the only safe layout: a transposed view times rows


class _GroupedSwiGLU(torch.autograd.Function):
    """Autograd function of `grouped`. It saves x and the gate and up pre-activations: no gathered x, h or output."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        p_NK: Tensor,
        w13: Tensor,
        w2: Tensor,
        order: Tensor,
        inverse: Tensor,
        ends: Tensor,
    ) -> Tensor:
        (N, K), (E, _, width, D) = p_NK.shape, w13.shape
        gate_up_R2F = _matmul(x_ND.index_select(0, order // K), w13.view(E, 2 * width, D).transpose(1, 2), ends)
        gate_RF, up_RF = gate_up_R2F.chunk(2, -1)
        out_RD = _matmul(F.silu(gate_RF) * up_RF, w2, ends)
        ctx.save_for_backward(x_ND, p_NK, w13, w2, gate_up_R2F, order, inverse, ends)
        return torch.einsum("nk,nkd->nd", p_NK.to(out_RD.dtype), out_RD.index_select(0, inverse).view(N, K, D))

    @staticmethod
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, p_NK, w13, w2, gate_up_R2F, order, inverse, ends = ctx.saved_tensors
        (N, K), (E, _, width, D) = p_NK.shape, w13.shape
        token = order // K
        dy_RD = dy_ND.index_select(0, token)  # copies: grouped_mm rejects an expanded or strided gradient
        dh_RF = _matmul(dy_RD, w2.transpose(1, 2), ends)  # before the multiplication by the routing weight
        gate_RF, up_RF = gate_up_R2F.chunk(2, -1)
        silu_RF = F.silu(gate_RF)
        h_RF = silu_RF * up_RF
        dp_NK = (h_RF * dh_RF).sum(-1, dtype=p_NK.dtype)[inverse].view(N, K)
        p_R1 = p_NK.reshape(-1)[order].to(h_RF.dtype)[:, None]
        dw2 = _weight_gradient(h_RF * p_R1, dy_RD, ends)
        dh_RF = dh_RF * p_R1
        dgate_RF = torch.ops.aten.silu_backward(dh_RF * up_RF, gate_RF)
        dgate_up_R2F = torch.cat([dgate_RF, dh_RF * silu_RF], -1)
        dw13 = _weight_gradient(dgate_up_R2F, x_ND.index_select(0, token), ends).view_as(w13)
        dx_RD = _matmul(dgate_up_R2F, w13.view(E, 2 * width, D), ends)
        return dx_RD.index_select(0, inverse).view(N, K, D).sum(1), dp_NK, dw13, dw2, None, None, None
