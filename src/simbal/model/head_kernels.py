"""The Triton kernel of the head on CUDA: a row's loss and gradient in two passes over its logits, in place.

Reference: the softmax in one pass of arXiv 1805.02867; the gradient in place of the logits as in Liger Kernel (arXiv
2410.10989).
Shapes: V vocabulary, C rows of one chunk.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits of a row that are read at once


def cross_entropy(
    logits_CV: Tensor, targets_C: Tensor, z_coef: float, N: int, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihoods and the log-normalisers; the logits' gradient takes the place of the logits.

    Args:
        logits_CV: with rows at any distance.
        targets_C: tokens.
        z_coef: of the z-loss.
        N: tokens over which the loss is the mean.
        with_gradient: whether to compute it; if not, the logits stay.
    """
    rows, V = logits_CV.shape
    assert logits_CV.stride(1) == 1, "the numbers of a row must lie side by side"
    nll_C, lse_C = (torch.empty_like(targets_C, dtype=torch.float32) for _ in range(2))
    cross_entropy_kernel[(rows,)](
        logits_CV, logits_CV.stride(0), targets_C, nll_C, lse_C, z_coef, 1 / N,
        V=V, WITH_GRADIENT=with_gradient, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return nll_C, lse_C


@triton.jit
def cross_entropy_kernel(
    logits_CV, row_stride, targets_C, nll_C, lse_C, z_coef, weight,
    V: tl.constexpr, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute lse = log sum exp(logits), nll = lse - logits[target] and ((1 + 2 z lse) p - onehot(target)) * weight.

    Each of BLOCK lanes keeps the largest logit it has seen and the sum of exponentials relative to it.
    """
    row = tl.program_id(0)
    target = tl.load(targets_C + row)
    row_at = logits_CV + row.to(tl.int64) * row_stride
    # before the sums, at which warps wait for one another: later, a faster one may have put a gradient there
    logit = tl.load(row_at + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, V, BLOCK):
        logits = tl.load(row_at + first + lane, mask=first + lane < V, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, logits)
        total = total * tl.exp(largest - larger) + tl.exp(logits - larger)
        largest = larger
    peak = tl.max(largest)
    lse = peak + tl.log(tl.sum(total * tl.exp(largest - peak)))
    tl.store(nll_C + row, lse - logit)
    tl.store(lse_C + row, lse)
    if WITH_GRADIENT:
        for first in range(0, V, BLOCK):
            at = row_at + first + lane
            p = tl.exp(tl.load(at, mask=first + lane < V, other=float("-inf")).to(tl.float32) - lse)
            gradient = weight * ((1 + 2 * z_coef * lse) * p - tl.where(first + lane == target, 1.0, 0.0))
            tl.store(at, gradient.to(logits_CV.dtype.element_ty), mask=first + lane < V)
