"""MegaBlocks' CUDA extension `megablocks_ops` in plain PyTorch, for MegaBlocks' own module in `upstream.py`.

The extension does not compile under CUDA 13 (databricks/megablocks, issue 180). It sorts and counts; the matrix
products are Triton kernels. Entry points and in-place outputs follow its csrc/ops.cu.
Shapes: R routed rows, E experts.
"""

import sys
from types import ModuleType

import torch
from torch import Tensor

NAME = "megablocks_ops"


def sort(keys_R: Tensor, end_bit: int, keys_out_R: Tensor, order_out_R: Tensor) -> None:
    """Write the sorted keys and their order; stable, like a radix sort."""
    values_R, order_R = torch.sort(keys_R, stable=True)
    keys_out_R.copy_(values_R)
    order_out_R.copy_(order_R)


def histogram(keys: Tensor, num_bins: int) -> Tensor:
    """Return the int32 count of each key, for each row of keys if `keys` has rows."""
    rows = keys.reshape(-1, keys.shape[-1]).long()
    counts = torch.zeros(len(rows), num_bins, dtype=torch.int32, device=keys.device)
    counts.scatter_add_(1, rows, torch.ones_like(rows, dtype=torch.int32))  # bincount would synchronize with the GPU
    return counts.view(*keys.shape[:-1], num_bins)


def inclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    """Write the cumulative sum along `dim`."""
    out.copy_(x.cumsum(dim))


def exclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    """Write the sum of the entries before each entry along `dim`."""
    out.copy_(x.cumsum(dim) - x)


def indices(padded_ends_E: Tensor, block_size: int, rows: int, cols: int, out: Tensor) -> None:
    """Write the block column of each block: a block row holds the `cols` blocks of its expert."""
    device = out.device
    expert = torch.searchsorted(padded_ends_E // block_size, torch.arange(rows, device=device), right=True)
    out.copy_((expert[:, None] * cols + torch.arange(cols, device=device)).reshape(-1))


def replicate_forward(x: Tensor, ends_E: Tensor, out: Tensor) -> None:
    """Write column e of `x` once for each row of expert e."""
    out.copy_(x.index_select(1, _expert_of_row(ends_E, out.shape[1])))


def replicate_backward(grad: Tensor, ends_E: Tensor, out: Tensor) -> None:
    """Write the sum of `grad` over each expert's rows."""
    out.zero_().index_add_(1, _expert_of_row(ends_E, grad.shape[1]), grad)


def _expert_of_row(ends_E: Tensor, rows: int) -> Tensor:
    return torch.searchsorted(ends_E, torch.arange(rows, device=ends_E.device, dtype=ends_E.dtype), right=True)


ENTRY_POINTS = (sort, histogram, inclusive_cumsum, exclusive_cumsum, indices, replicate_forward, replicate_backward)


def install() -> str:
    """Fill the module `megablocks_ops` unless the compiled extension is installed.

    Returns:
        `compiled` if the extension is installed, else `torch`.
    """
    try:
        import megablocks_ops
    except ImportError:  # not installed, or built for another version of torch
        megablocks_ops = sys.modules[NAME] = ModuleType(NAME)
    if not hasattr(megablocks_ops, "sort"):  # also fills the empty module of simbal.experts.megablocks
        for entry_point in ENTRY_POINTS:
            setattr(megablocks_ops, entry_point.__name__, entry_point)
    return "torch" if megablocks_ops.sort is sort else "compiled"
