"""The language-model head: cross-entropy and output z-loss in chunks, so the (N, V) logits are never stored in full.

Reference: output z-loss as in OLMo 2 (arXiv 2501.00656) and arXiv 2506.14038, section 3.2; gradients computed chunk by
chunk in the forward pass, as in Liger Kernel (arXiv 2410.10989).
Shapes: N tokens, V vocabulary, P padded vocabulary, D model width, C rows of one chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from simbal.model import native
from simbal.model.matmul import mm

ChunkLoss = tuple[Tensor, Tensor, Tensor | None]  # nll_C, lse_C, gradient of the logits

# logits per chunk: 8 MB of fp32 on a CPU (16 MB with the kernels in C, which make fewer passes), 512 MB of bf16 on CUDA
CHUNK_ELEMENTS = {"cpu": 2**21, "native": 2**22, "cuda": 2**28}
VOCAB_MULTIPLE = {"cpu": 1, "cuda": 64}  # the vocabulary is padded to this multiple for fast matrix products on CUDA


@dataclass(frozen=True)
class HeadLoss:
    """The head's loss, the mean over tokens of nll + z_coef * lse^2, in nats; only `loss` is differentiable."""

    loss: Tensor
    nll_N: Tensor  # -log p(target)


def head_loss(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, z_coef: float, kernels: str = "torch") -> HeadLoss:
    """Compute the loss of `logits = x W^T`, with matrix products in the compute dtype and the rest in fp32.

    `kernels=native` uses the kernels in C where they can run.

    Raises:
        RuntimeError: a target is not in [0, V). On CUDA its loss is NaN instead, to avoid a synchronization.
    """
    device = x_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
    if kernels != "native" or device != "cpu" or dtype != torch.float32:
        kernels = device
    with torch.autocast(device, enabled=False):
        operands = x_ND.to(dtype), weight_VD.to(dtype), targets_N
        outputs = _ChunkedHead.apply(*operands, z_coef, CHUNK_LOSS[kernels], torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return HeadLoss(*outputs)


class _ChunkedHead(torch.autograd.Function):
    """Autograd function of `head_loss`; the forward pass already computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        z_coef: float,
        chunk_loss: Callable[..., ChunkLoss],
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        place = "native" if chunk_loss is _chunk_loss_by_native else x_ND.device.type
        rows = max(1, CHUNK_ELEMENTS[place] // len(weight_VD))
        nll_N, lse_N = (torch.empty_like(targets_N, dtype=torch.float32) for _ in range(2))
        # pad with zero rows, e.g. for the odd V of cl100k_base; the kernel excludes them and gives them the gradient 0
        missing = -len(weight_VD) % VOCAB_MULTIPLE[x_ND.device.type]
        weight_PD = F.pad(weight_VD, (0, 0, 0, missing)) if missing else weight_VD
        if with_gradient:
            dx_ND = torch.empty_like(x_ND)
            empty = torch.empty_like if place == "native" else torch.zeros_like
            dweight_PD = empty(weight_PD, dtype=torch.float32)
        for begin in range(0, len(x_ND), rows):
            chunk = slice(begin, begin + rows)
            nll_N[chunk], lse_N[chunk], dlogits_CP = chunk_loss(
                x_ND[chunk], weight_PD, len(weight_VD), targets_N[chunk], z_coef, len(x_ND), with_gradient
            )
            if dlogits_CP is not None:
                dx_ND[chunk] = mm(dlogits_CP, weight_PD)
                if x_ND.is_cuda:  # adds in fp32 without rounding the product, and without a separate pass
                    torch.addmm(dweight_PD, dlogits_CP.T, x_ND[chunk], out_dtype=torch.float32, out=dweight_PD)
                elif place == "native":
                    dweight_PD.addmm_(dlogits_CP.T, x_ND[chunk], beta=min(begin, 1))
                else:
                    dweight_PD += mm(dlogits_CP.T, x_ND[chunk])
        if with_gradient:
            ctx.save_for_backward(dx_ND, dweight_PD[: len(weight_VD)].to(weight_VD.dtype))
        ctx.mark_non_differentiable(nll_N)
        return (nll_N + z_coef * lse_N.square()).sum() / len(x_ND), nll_N

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the saved gradient would count as a constant
            raise RuntimeError("head_loss has no second derivative: use F.cross_entropy with create_graph=True")
        dx_ND, dweight_VD = ctx.saved_tensors
        return _scaled(dx_ND, dloss), _scaled(dweight_VD, dloss), None, None, None, None


def _scaled(gradient: Tensor, dloss: Tensor) -> Tensor:
    """Return gradient * dloss, rounded only once: rounding dloss = 1/3 to bf16 first would add an error of 0.2%."""
    if not dloss.is_cuda and dloss == 1:  # on CUDA the comparison would synchronize
        return gradient
    return torch.mul(gradient, dloss[None], out=torch.empty_like(gradient))


def _chunk_loss_by_kernel(
    x_CD: Tensor, weight_PD: Tensor, V: int, targets_C: Tensor, z_coef: float, N: int, with_gradient: bool
) -> ChunkLoss:
    """Do the same as `_chunk_loss_by_torch` with a CUDA kernel; the gradient, (C, P), overwrites the logits."""
    from simbal.model.kernels import cross_entropy

    logits_CP = torch.mm(x_CD, weight_PD.T)
    nll_C, lse_C = cross_entropy(logits_CP, V, targets_C, z_coef, N, with_gradient)
    return nll_C, lse_C, logits_CP if with_gradient else None


def _chunk_loss_by_torch(
    x_CD: Tensor, weight_VD: Tensor, V: int, targets_C: Tensor, z_coef: float, N: int, with_gradient: bool
) -> ChunkLoss:
    """Return the negative log-likelihoods, log-normalizers and the logits' gradient in the logits' dtype, (C, V)."""
    product_CV = mm(x_CD, weight_VD.T)
    logits_CV = product_CV.float()
    target_logits_C = logits_CV.gather(1, targets_C[:, None])[:, 0]
    max_C1 = logits_CV.amax(1, keepdim=True)
    exp_CV = logits_CV.sub_(max_C1).exp_()
    total_C1 = exp_CV.sum(1, keepdim=True)
    lse_C = (max_C1 + total_C1.log())[:, 0]
    nll_C = lse_C - target_logits_C
    if not with_gradient:
        return nll_C, lse_C, None
    # ((1 + 2 z_coef lse) p - onehot(target)) / N with p = exp / total
    exp_CV *= (1 / N * (1 + 2 * z_coef * lse_C))[:, None] / total_C1
    dlogits_CV = exp_CV.scatter_add_(1, targets_C[:, None], exp_CV.new_full((len(exp_CV), 1), -1 / N))
    return nll_C, lse_C, dlogits_CV.to(product_CV.dtype)


def _chunk_loss_by_native(
    x_CD: Tensor, weight_VD: Tensor, V: int, targets_C: Tensor, z_coef: float, N: int, with_gradient: bool
) -> ChunkLoss:
    """Do the same as `_chunk_loss_by_torch` with a kernel in C; the gradient overwrites the logits."""
    logits_CV = mm(x_CD, weight_VD.T)
    nll_C, lse_C = native.cross_entropy(logits_CV, targets_C, z_coef, N, with_gradient)
    return nll_C, lse_C, logits_CV if with_gradient else None


CHUNK_LOSS = {"cpu": _chunk_loss_by_torch, "cuda": _chunk_loss_by_kernel, "native": _chunk_loss_by_native}
