"""The Triton kernel of rotary position embeddings on CUDA: one pass over queries or keys, at whatever strides they lie.

Shapes: B batch, H heads, S sequence, P head width.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor


def turned(x_BHSP: Tensor, rotation_2SP: Tensor, direction: int) -> Tensor:
    """Return each channel pair turned by its angle, in fp32; direction -1 turns it back."""
    B, H, S, P = x_BHSP.shape
    y_BHSP = torch.empty_like(x_BHSP)
    rotary_kernel[(B * S,)](
        x_BHSP, *x_BHSP.stride(), y_BHSP, *y_BHSP.stride(), *rotation_2SP, direction, S,
        H=H, PAIRS=P // 2, HEADS=triton.next_power_of_2(H), LANES=triton.next_power_of_2(P // 2), num_warps=2,
    )  # fmt: skip
    return y_BHSP


@triton.jit
def rotary_kernel(
    x_BHSP, x_B, x_H, x_S, x_P, y_BHSP, y_B, y_H, y_S, y_P, cos_SP, sin_SP, direction, S,
    H: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Turn the pairs of one token's heads: channels i and i + P/2 by the angle at channel i."""
    token = tl.program_id(0).to(tl.int64)
    sequence, position = token // S, token % S
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, LANES)[None, :]
    here = (head < H) & (pair < PAIRS)
    angle = position * 2 * PAIRS + pair
    cos = tl.load(cos_SP + angle, mask=pair < PAIRS)
    sin = tl.load(sin_SP + angle, mask=pair < PAIRS) * direction
    x = x_BHSP + sequence * x_B + head * x_H + position * x_S + pair * x_P
    y = y_BHSP + sequence * y_B + head * y_H + position * y_S + pair * y_P
    first = tl.load(x, mask=here).to(tl.float32)
    second = tl.load(x + PAIRS * x_P, mask=here).to(tl.float32)
    tl.store(y, (first * cos - second * sin).to(y_BHSP.dtype.element_ty), mask=here)
    tl.store(y + PAIRS * y_P, (second * cos + first * sin).to(y_BHSP.dtype.element_ty), mask=here)
