"""Rotary position embeddings.

Reference: RoFormer (arXiv 2104.09864), in the half-split layout of GPT-NeoX and Llama: pair i of a head's channels
stands at i and i + P/2.
Shapes: B batch, H heads, S sequence, P head width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotary_angles(seq_len: int, head_width: int, theta: float, device: torch.device) -> Tensor:
    """Return cos and sin, (2, S, P), of position s times theta^(-2i/P)."""
    frequencies = theta ** -(torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
    angles = torch.arange(seq_len, device=device, dtype=torch.float32)[:, None] * frequencies.repeat(2)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x_BHSP: Tensor, rotation_2SP: Tensor) -> Tensor:
    """Turn each channel pair by its angle, in fp32, with the cosines and sines of `rotary_angles`.

    On CUDA one kernel does it, in a twentieth of the operators' time; torch.compile makes one of its own of them.
    """
    if x_BHSP.is_cuda and not torch.compiler.is_compiling():
        return _Rotation.apply(x_BHSP, rotation_2SP)  # type: ignore[no-any-return, no-untyped-call]
    cos_SP, sin_SP = rotation_2SP
    first, second = x_BHSP.float().chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    rotated_BHSP: Tensor = x_BHSP * cos_SP + turned * sin_SP
    return rotated_BHSP.to(x_BHSP.dtype)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BHSP: Tensor, rotation_2SP: Tensor) -> Tensor:
        from simbal.model.rotary_kernels import turned

        ctx.save_for_backward(rotation_2SP)
        return turned(x_BHSP, rotation_2SP, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BHSP: Tensor) -> tuple[Tensor, None]:
        from simbal.model.rotary_kernels import turned

        (rotation_2SP,) = ctx.saved_tensors
        return turned(dy_BHSP, rotation_2SP, -1), None
