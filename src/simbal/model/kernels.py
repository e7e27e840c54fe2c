"""Triton kernels for CUDA: the head's cross-entropy and rotary position embeddings.

`cross_entropy` computes a row's loss and gradient in two passes over its logits, in place. `rotate_pairs` rotates
queries or keys in one pass and accepts any strides.
Reference: one-pass softmax: arXiv 1805.02867; gradient in place of the logits, as in Liger Kernel (arXiv 2410.10989).
Shapes: V vocabulary, P the vocabulary padded (in `rotate_pairs`: head width), C rows of one chunk, B batch, H heads,
S sequence length.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # logits read per iteration


def cross_entropy(
    logits_CP: Tensor, V: int, targets_C: Tensor, z_coef: float, N: int, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihoods and log-normalizers; overwrite the logits with their gradient.

    Args:
        logits_CP: contiguous; columns from V on are padding, with a gradient of 0.
        V: size of the vocabulary.
        targets_C: target tokens; the loss of a target outside of [0, V) is NaN.
        z_coef: coefficient of the z-loss.
        N: number of tokens in the mean of the loss.
        with_gradient: if False, the logits stay unchanged.
    """
    rows, P = logits_CP.shape
    assert logits_CP.is_contiguous(), "logits must be contiguous"
    nll_C, lse_C = (torch.empty_like(targets_C, dtype=torch.float32) for _ in range(2))
    cross_entropy_kernel[(rows,)](
        logits_CP, targets_C, nll_C, lse_C, z_coef, 1 / N,
        V=V, P=P, WITH_GRADIENT=with_gradient, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return nll_C, lse_C


@triton.jit
def cross_entropy_kernel(
    logits_CP, targets_C, nll_C, lse_C, z_coef, weight,
    V: tl.constexpr, P: tl.constexpr, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute lse = log sum exp(logits), nll = lse - logits[target] and ((1 + 2 z lse) p - onehot(target)) * weight.

    Each of BLOCK lanes keeps its largest logit so far and the sum of exponentials relative to it. Rows are read and
    written up to their padded ends, because only aligned groups of values are loaded and stored by one instruction.
    """
    row = tl.program_id(0)
    target = tl.load(targets_C + row)
    row_at = logits_CP + row.to(tl.int64) * P
    # must precede the sums, which synchronize the warps: later, a faster warp may have overwritten it with a gradient
    logit = tl.load(row_at + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, P, BLOCK):
        logits = token_logits(row_at, first + lane, V, P)
        larger = tl.maximum(largest, logits)
        total = total * tl.exp(largest - larger) + tl.exp(logits - larger)
        largest = larger
    peak = tl.max(largest)
    lse = peak + tl.log(tl.sum(total * tl.exp(largest - peak)))
    tl.store(nll_C + row, lse - logit)
    tl.store(lse_C + row, lse)
    if WITH_GRADIENT:
        for first in range(0, P, BLOCK):
            token = first + lane
            p = tl.exp(token_logits(row_at, token, V, P) - lse)
            gradient = weight * ((1 + 2 * z_coef * lse) * p - tl.where(token == target, 1.0, 0.0))
            tl.store(row_at + token, gradient.to(logits_CP.dtype.element_ty), mask=token < P)


@triton.jit
def token_logits(row_at, token, V: tl.constexpr, P: tl.constexpr):
    """Return the tokens' logits in fp32, -inf from V on."""
    logits = tl.load(row_at + token, mask=token < P, other=0.0).to(tl.float32)
    return tl.where(token < V, logits, float("-inf"))


def rotate_pairs(x_BHSP: Tensor, rotation_2SP: Tensor, direction: int) -> Tensor:
    """Return each channel pair rotated by its angle, computed in fp32; direction -1 rotates back."""
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
    """Rotate the channel pairs (i, i + P/2) of one token's heads by the angle of channel i."""
    token = tl.program_id(0).to(tl.int64)
    sequence, position = token // S, token % S
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, LANES)[None, :]
    mask = (head < H) & (pair < PAIRS)
    angle = position * 2 * PAIRS + pair
    cos = tl.load(cos_SP + angle, mask=pair < PAIRS)
    sin = tl.load(sin_SP + angle, mask=pair < PAIRS) * direction
    x = x_BHSP + sequence * x_B + head * x_H + position * x_S + pair * x_P
    y = y_BHSP + sequence * y_B + head * y_H + position * y_S + pair * y_P
    first = tl.load(x, mask=mask).to(tl.float32)
    second = tl.load(x + PAIRS * x_P, mask=mask).to(tl.float32)
    tl.store(y, (first * cos - second * sin).to(y_BHSP.dtype.element_ty), mask=mask)
    tl.store(y + PAIRS * y_P, (second * cos + first * sin).to(y_BHSP.dtype.element_ty), mask=mask)
