"""MegaBlocks' own module `ParallelDroplessMLP`, for comparison in `gpu_check.py` and its tests.

`sparse` is its block-sparse path with int32 block indices (int16 indices overflow at block 256, so it rejects Triton
>= 3.2). `grouped` is its grouped path, which uses `F.grouped_mm` unless the package grouped_gemm is installed.
"""

import importlib
import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.megablocks_ops import install
from simbal.experts.megablocks import import_kernels


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is contiguous: grouped_mm rejects an expanded gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def _gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
    """Replace grouped_gemm.backend.gmm."""
    ends = batch_sizes.to(a.device).cumsum(0, dtype=torch.int32)
    return F.grouped_mm(a.t() if trans_a else a, b.transpose(-2, -1) if trans_b else b, offs=ends)


def _differentiable_gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    product: Tensor = _ContiguousGradient.apply(_gmm(a, b, batch_sizes, trans_b=trans_b))  # type: ignore[no-untyped-call]
    return product


def install_grouped_gemm() -> str:
    """Return `compiled` if grouped_gemm is installed, else install a stand-in and return `torch`.

    Installing grouped_gemm needs a GPU, so nothing here requires it.
    """
    grouped_gemm: Any
    try:
        grouped_gemm = importlib.import_module("grouped_gemm")
    except ImportError:
        grouped_gemm = ModuleType("grouped_gemm")
        grouped_gemm.backend = SimpleNamespace(gmm=_gmm)
        grouped_gemm.ops = SimpleNamespace(gmm=_differentiable_gmm)
        sys.modules["grouped_gemm"] = grouped_gemm
    return "torch" if grouped_gemm.backend.gmm is _gmm else "compiled"


GROUPED_GEMM = install_grouped_gemm()  # before megablocks is imported, which looks for it


def upstream_module(
    impl: str, D: int, width: int, E: int, K: int, device: torch.device, dtype: torch.dtype
) -> torch.nn.Module:
    """Return a `ParallelDroplessMLP` with external routing: call it with (x[None], None, p_NK, experts_NK)."""
    import_kernels()
    install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import stk
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import ParallelDroplessMLP

    class WideIndices(ParallelDroplessMLP):  # type: ignore[misc]
        """ParallelDroplessMLP with int32 block indices, which do not overflow."""

        def topology(self, x: Tensor, padded_bins: Tensor) -> Any:
            t = super().topology(x, padded_bins)
            return stk.Matrix(
                t.size(), t.data, t.row_indices.int(), t.column_indices.int(), t.offsets,
                t.column_indices_t.int(), t.offsets_t, t.block_offsets_t,
            )  # fmt: skip

    arguments = Arguments(
        hidden_size=D, ffn_hidden_size=width, moe_num_experts=E, moe_top_k=K,
        mlp_type="glu", mlp_impl="grouped", activation_fn=F.silu,
        bias=False, return_bias=False,  # the default returns a tuple
        moe_loss_weight=0.0,  # the default keeps router scores in a global list
        fp16=dtype is torch.float16, bf16=dtype is torch.bfloat16, device=device,
    )  # fmt: skip
    arguments.mlp_impl = impl  # the check that rejects Triton >= 3.2 reads only the constructor's value
    return WideIndices(arguments)
