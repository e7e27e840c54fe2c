"""MegaBlocks' own module, `ParallelDroplessMLP`, made to run beside ours: for `gpu_check.py` and its tests.

`sparse` is its block-sparse path with int32 block indices (its int16 ones overflow at block 256, and it refuses Triton
>= 3.2 for it); `grouped` is its grouped path, over `F.grouped_mm` where the package grouped_gemm is not installed.
"""

import importlib
import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from simbal.experts.megablocks_ops import kernels


class _ContiguousGradient(torch.autograd.Function):
    """Identity; grouped_mm refuses an expanded gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def _gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
    """Compute what grouped_gemm.backend.gmm computes."""
    ends = batch_sizes.to(a.device).cumsum(0, dtype=torch.int32)
    return F.grouped_mm(a.t() if trans_a else a, b.transpose(-2, -1) if trans_b else b, offs=ends)


def _differentiable_gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    product: Tensor = _ContiguousGradient.apply(_gmm(a, b, batch_sizes, trans_b=trans_b))  # type: ignore[no-untyped-call]
    return product


def install_grouped_gemm() -> str:
    """`compiled` if grouped_gemm is there, else `torch`: its installation needs a GPU, so nothing depends on it."""
    grouped_gemm: Any
    try:
        grouped_gemm = importlib.import_module("grouped_gemm")
    except ImportError:
        grouped_gemm = ModuleType("grouped_gemm")
        grouped_gemm.backend = SimpleNamespace(gmm=_gmm)
        grouped_gemm.ops = SimpleNamespace(gmm=_differentiable_gmm)
        sys.modules["grouped_gemm"] = grouped_gemm
    return "torch" if grouped_gemm.backend.gmm is _gmm else "compiled"


GROUPED_GEMM = install_grouped_gemm()  # now: megablocks looks for it when it is imported, by whichever backend is first


def upstream_module(
    impl: str, D: int, width: int, E: int, K: int, device: torch.device, dtype: torch.dtype
) -> torch.nn.Module:
    """`ParallelDroplessMLP`, routed from outside: call it with (x[None], None, p_NK, experts_NK)."""
    kernels()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import stk
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import ParallelDroplessMLP

    class WideIndices(ParallelDroplessMLP):  # type: ignore[misc]
        """The same with block indices that do not overflow."""

        def topology(self, x: Tensor, padded_bins: Tensor) -> Any:
            t = super().topology(x, padded_bins)
            return stk.Matrix(
                t.size(), t.data, t.row_indices.int(), t.column_indices.int(), t.offsets,
                t.column_indices_t.int(), t.offsets_t, t.block_offsets_t,
            )  # fmt: skip

    arguments = Arguments(
        hidden_size=D, ffn_hidden_size=width, moe_num_experts=E, moe_top_k=K,
        mlp_type="glu", mlp_impl="grouped", activation_fn=F.silu,
        bias=False, return_bias=False,  # by default it returns a tuple
        moe_loss_weight=0.0,  # by default it keeps router scores in a global list
        fp16=dtype is torch.float16, bf16=dtype is torch.bfloat16, device=device,
    )  # fmt: skip
    arguments.mlp_impl = impl  # what refuses Triton >= 3.2 looks at the constructor's value only
    return WideIndices(arguments)
