"""Where the blocks of MegaBlocks' block-sparse matrices lie, and its two products with dense ones.

Reference: MegaBlocks (arXiv 2211.15841), section 5; the kernels are stanford-stk 0.7.1's.
Shapes: Z blocks, T rows within a block, G padded rows, E experts, M columns of one expert, J any.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from simbal.errors import UserError
from simbal.experts.megablocks_ops import kernels

BLOCK = 128
INT32_ELEMENTS = 2**31


class Topology:
    """A block-sparse (G, E*M) matrix: each block row holds the M/128 blocks of its expert and no others.

    SDD gets int32 indices: since Triton 3.2 the kernel's `int16 * 128` stays int16, so that blocks from 256 on are
    wrong (stanford-futuredata/stk, pull request 17). DSD widens before it multiplies and gets int16, because int32
    would halve its pipeline (shared memory 64 to 32 KiB, 4 stages to 2).
    """

    def __init__(self, blocks_E: Tensor, num_rows: int, width: int) -> None:
        """`blocks_E` block rows of each expert, `num_rows` in all, `width` M."""
        device, rows, cols = blocks_E.device, num_rows // BLOCK, width // BLOCK
        if num_rows * width >= INT32_ELEMENTS:
            raise UserError(
                f"experts.backend=megablocks cannot hold {num_rows} rows of {width} features: its kernels count "
                "elements in 32 bits; use a smaller trainer.micro_batch"
            )
        row = torch.arange(rows, device=device)
        expert = torch.searchsorted(blocks_E.cumsum(0), row, right=True)
        column_Z = (expert[:, None] * cols + torch.arange(cols, device=device)).reshape(-1)
        row_Z = row[:, None].expand(rows, cols).reshape(-1)
        by_column_Z = torch.argsort(column_Z, stable=True)
        self.shape = num_rows, len(blocks_E) * width
        self.row_Z, self.column_Z = row_Z.int(), column_Z.int()
        self.short_column_Z, self.short_row_by_column_Z = column_Z.short(), row_Z[by_column_Z].short()
        self.begin_of_row = torch.arange(0, rows * cols + 1, cols, dtype=torch.int32, device=device)
        # M/128 equal columns of blocks for each expert; no repeat_interleave: it waits for the device
        blocks_of_column = blocks_E[:, None].expand(-1, cols).reshape(-1)
        self.begin_of_column = F.pad(blocks_of_column.cumsum(0), (1, 0)).int()
        self.by_column_Z = by_column_Z.int()

    def sdd(self, a_GJ: Tensor, b_JM: Tensor) -> Tensor:
        """The blocks (Z, T, T) of a dense product; `b_JM` has the columns of all experts."""
        out_ZTT = a_GJ.new_empty(len(self.row_Z), BLOCK, BLOCK)
        kernels()[1].sdd(a_GJ, b_JM, self.shape, out_ZTT, self.begin_of_row, self.row_Z, self.column_Z)
        return out_ZTT

    def dsd(self, blocks_ZTT: Tensor, b: Tensor, transpose: bool = False) -> Tensor:
        """Blocks, or their transpose, times a dense matrix."""
        shape = self.shape[::-1] if transpose else self.shape
        out = b.new_empty(shape[0], b.shape[1])
        kernels()[1].dsd(
            shape, blocks_ZTT, self.begin_of_row, self.row_Z, self.short_column_Z,
            self.begin_of_column, self.short_row_by_column_Z, self.by_column_Z, transpose, b, out,
        )  # fmt: skip
        return out
