"""A stand-in for MegaBlocks' CUDA extension `megablocks_ops` in plain PyTorch, so that nothing has to be compiled.

As shipped, MegaBlocks 0.10.0 does not import without that extension, which does not compile under CUDA 13
(databricks/megablocks, issue 180). It sorts and counts; the matrix products are Triton kernels.
Reference: MegaBlocks (arXiv 2211.15841); the entry points and their in-place outputs are those of its csrc/ops.cu.
Shapes: R routed rows, E experts, N tokens.
"""

import os
import sys
import warnings
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

NAME = "megablocks_ops"


def sort(keys_R: Tensor, end_bit: int, keys_out_R: Tensor, order_out_R: Tensor) -> None:
    """Write the sorted keys and their order; stable, as a radix sort is: rows of one expert keep the tokens' order."""
    values_R, order_R = torch.sort(keys_R, stable=True)
    keys_out_R.copy_(values_R)
    order_out_R.copy_(order_R)


def histogram(keys: Tensor, num_bins: int) -> Tensor:
    """Return the int32 count of each key, for each row of keys if there are rows."""
    rows = keys.reshape(-1, keys.shape[-1]).long()
    counts = torch.zeros(len(rows), num_bins, dtype=torch.int32, device=keys.device)
    counts.scatter_add_(1, rows, torch.ones_like(rows, dtype=torch.int32))  # not bincount: it waits for the device
    return counts.view(*keys.shape[:-1], num_bins)


def inclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    """Write the sum up to and including each entry along `dim`."""
    out.copy_(x.cumsum(dim))


def exclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    """Write the sum up to each entry along `dim`, without the entry."""
    out.copy_(x.cumsum(dim) - x)


def indices(padded_ends_E: Tensor, block_size: int, rows: int, cols: int, out: Tensor) -> None:
    """Write the block column of each block: a block row holds the `cols` blocks of the expert whose rows it pads."""
    device = out.device
    expert = torch.searchsorted(padded_ends_E // block_size, torch.arange(rows, device=device), right=True)
    out.copy_((expert[:, None] * cols + torch.arange(cols, device=device)).reshape(-1))


def replicate_forward(x: Tensor, ends_E: Tensor, out: Tensor) -> None:
    """Write column e of `x` once for each row of expert e."""
    out.copy_(x.index_select(1, _segments(ends_E, out.shape[1])))


def replicate_backward(grad: Tensor, ends_E: Tensor, out: Tensor) -> None:
    """Write the sum of `grad` over each expert's rows."""
    out.zero_().index_add_(1, _segments(ends_E, grad.shape[1]), grad)


def _segments(ends_E: Tensor, rows: int) -> Tensor:
    return torch.searchsorted(ends_E, torch.arange(rows, device=ends_E.device, dtype=ends_E.dtype), right=True)


ENTRY_POINTS = (sort, histogram, inclusive_cumsum, exclusive_cumsum, indices, replicate_forward, replicate_backward)


def install() -> str:
    """Make `import megablocks` work, with the stand-in where the extension is missing.

    Returns:
        `compiled` if the extension is there, else `torch`: what goes into the run record.
    """
    if NAME not in sys.modules:
        try:
            import megablocks_ops  # noqa: F401
        except ImportError:  # absent, or built for another torch
            stand_in = ModuleType(NAME, __doc__)
            for entry_point in ENTRY_POINTS:
                setattr(stand_in, entry_point.__name__, entry_point)
            sys.modules[NAME] = stand_in
    return "torch" if getattr(sys.modules[NAME], "sort", None) is sort else "compiled"


def interpreted() -> bool:
    """Whether Triton runs on the CPU by its interpreter, for tests; it must be set before Triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def kernels() -> tuple[ModuleType, ModuleType]:
    """Import and return `megablocks.backend.kernels` and `stk.backend.triton_kernels`."""
    install()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Grouped GEMM not available")
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        import megablocks.backend.kernels
        import stk.backend.triton_kernels
    if interpreted():  # autotuning needs a driver: one configuration leaves nothing to tune
        for kernel in vars(megablocks.backend.kernels).values():
            if hasattr(kernel, "configs"):
                kernel.configs = kernel.configs[:1]
    return megablocks.backend.kernels, stk.backend.triton_kernels
