"""Attention, RMSNorm and the head's cross-entropy in C on a CPU, for fp32.

The equations are in `simbal/native/kernels.c`.
Shapes: B batch, S sequence, H query heads, P head width, C rows of one chunk, V vocabulary; Q the channels of queries,
keys and values together.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from simbal.errors import UserError
from simbal.experts.select import BackendChoice
from simbal.native import library


def select_kernels(name: str, device: torch.device, dtype: torch.dtype, compiled: bool) -> BackendChoice:
    """Return the kernels of attention and head, torch or native, and the reason.

    Raises:
        UserError: `name` is native, which cannot run here.
    """
    if name == "torch":
        return BackendChoice("torch", "torch, set by model.kernels")
    reason = "it cannot be combined with trainer.compile=true" if compiled else library.unsupported(device, dtype)
    reason = reason and f"native cannot run here: {reason}"
    if reason and name == "native":
        raise UserError(f"model.kernels={reason}")
    if name == "auto" and (reason := reason or library.unmeasured()):
        return BackendChoice("torch", f"auto chose torch: {reason}")
    return BackendChoice("native", f"native, {'chosen by auto' if name == 'auto' else 'set by model.kernels'}")


def can_run(x: Tensor) -> bool:
    """Whether the kernels support this tensor in the current context."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


def attention(qkv_BSQ: Tensor, rotation_2SP: Tensor, num_heads: int, head_width: int) -> Tensor:
    """Return causal attention, (B, S, H*P), of queries, keys and values that are not yet rotated."""
    y_BSD: Tensor = _Attention.apply(qkv_BSQ, rotation_2SP, num_heads, head_width)  # type: ignore[no-untyped-call]
    return y_BSD


class _Attention(torch.autograd.Function):
    """Autograd function of `attention`. It saves its input, its output and the log-normalizer of each query."""

    @staticmethod
    def forward(ctx: Any, qkv_BSQ: Tensor, rotation_2SP: Tensor, num_heads: int, head_width: int) -> Tensor:
        qkv_BSQ, rotation_2SP = qkv_BSQ.contiguous(), rotation_2SP.contiguous()
        B, S, channels = qkv_BSQ.shape
        y_BSD = qkv_BSQ.new_empty(B, S, num_heads * head_width)
        lse_BHS = qkv_BSQ.new_empty(B, num_heads, S)
        ctx.sizes = B, S, num_heads, (channels // head_width - num_heads) // 2, head_width
        library.call("attention_forward", qkv_BSQ, rotation_2SP, y_BSD, lse_BHS, *ctx.sizes)
        ctx.save_for_backward(qkv_BSQ, rotation_2SP, y_BSD, lse_BHS)
        return y_BSD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BSD: Tensor) -> tuple[Tensor, None, None, None]:
        qkv_BSQ, *others = ctx.saved_tensors
        dqkv_BSQ = torch.empty_like(qkv_BSQ)
        library.call("attention_backward", dy_BSD.contiguous(), qkv_BSQ, *others, dqkv_BSQ, *ctx.sizes)
        return dqkv_BSQ, None, None, None


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, in C with `kernels=native` where it can run."""

    def __init__(self, width: int, eps: float, kernels: str) -> None:
        super().__init__(width, eps)
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized tensor."""
        if self.kernels != "native" or not can_run(x):
            return super().forward(x)
        y: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return y


class _RMSNorm(torch.autograd.Function):
    """Autograd function of `RMSNorm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        N, D = x.numel() // len(weight_D), len(weight_D)
        inverse_N = x.new_empty(N)
        library.call("norm_forward", x, weight_D, y, inverse_N, N, D, eps)
        ctx.save_for_backward(x, weight_D, inverse_N)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_D, inverse_N = ctx.saved_tensors
        dx, dweight_D, sizes = torch.empty_like(x), torch.empty_like(weight_D), (len(inverse_N), len(weight_D))
        library.call("norm_backward", dy.contiguous(), x, weight_D, inverse_N, dx, dweight_D, *sizes)
        return dx, dweight_D, None


def cross_entropy(
    logits_CV: Tensor, targets_C: Tensor, z_coef: float, N: int, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return each row's negative log-likelihood and log-normalizer; with `with_gradient`, logits become their gradient.

    Raises:
        RuntimeError: a target is not in [0, V).
    """
    (C, V), targets_C = logits_CV.shape, targets_C.contiguous()
    nll_C, lse_C = (logits_CV.new_empty(C) for _ in range(2))
    library.call("head_loss", logits_CV, targets_C, nll_C, lse_C, C, V, float(z_coef), N, with_gradient)
    return nll_C, lse_C
