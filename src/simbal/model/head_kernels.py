"""The Triton kernel of the head on CUDA: a row's loss and gradient in two passes over its logits, in place.

Reference: the softmax in one pass of arXiv 1805.02867; the gradient in place of the logits as in Liger Kernel (arXiv
2410.10989).
Shapes: V vocabulary, P the same padded, C rows of one chunk.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # logits of a row that are read at once


def cross_entropy(
    logits_CP: Tensor, V: int, targets_C: Tensor, z_coef: float, N: int, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihoods and the log-normalisers; the logits' gradient takes the place of the logits.

    Args:
        logits_CP: contiguous; those from V on are no tokens' and have the gradient 0.
        V: the number of tokens.
        targets_C: tokens.
        z_coef: of the z-loss.
        N: tokens over which the loss is the mean.
        with_gradient: whether to compute it; if not, the logits stay.
    """
    rows, P = logits_CP.shape
    assert logits_CP.is_contiguous(), "rows of logits must lie side by side"
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

    Each of BLOCK lanes keeps the largest logit it has seen and the sum of exponentials relative to it. Rows are read
    and written to their padded ends, as only whole groups of numbers are moved at once.
    """
    row = tl.program_id(0)
    target = tl.load(targets_C + row)
    row_at = logits_CP + row.to(tl.int64) * P
    # before the sums, at which warps wait for one another: later, a faster one may have put a gradient there
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
    """Return the logits of tokens in fp32, -inf from V on."""
    logits = tl.load(row_at + token, mask=token < P, other=0.0).to(tl.float32)
    return tl.where(token < V, logits, float("-inf"))
