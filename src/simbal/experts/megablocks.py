"""Backend `megablocks`: MegaBlocks' padded copies and stk's block-sparse products, with a memory-saving backward pass.

MegaBlocks itself has no memory-optimized block-sparse GLU (it raises NotImplementedError). Its routing, arguments and
modules are not used. Each layer synchronizes with the GPU three times, once per padded gather.
Reference: MegaBlocks (arXiv 2211.15841); megablocks 0.10.0, layers/glu.py; SonicMoE for the router gradient
<h, dy W2^T>, which needs no expert output.
Shapes: N tokens, D model width, E experts, F expert hidden width, K experts per token, R = N*K routed rows,
G rows padded to blocks of 128 per expert, Z blocks of T x T, M columns of an expert, J the dimension summed over.
"""

import importlib.util
import os
import sys
import warnings
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from simbal.errors import UserError
from simbal.experts.backends import RoutingPlan

BLOCK = 128
INT32_ELEMENTS = 2**31


def megablocks(x_ND: Tensor, plan: RoutingPlan, w13_E2FD: Tensor, w2_EFD: Tensor) -> Tensor:
    """Compute the experts, (N, D), with MegaBlocks' copies and stk's block-sparse products."""
    if not x_ND.dtype == w13_E2FD.dtype == w2_EFD.dtype:  # the kernels would misread a second dtype
        raise ValueError(f"x, w13 and w2 must have one dtype, got {x_ND.dtype}, {w13_E2FD.dtype} and {w2_EFD.dtype}")
    y_ND: Tensor = _BlockSparseSwiGLU.apply(x_ND, plan.weights_NK, w13_E2FD, w2_EFD, *_every_slot(plan))  # type: ignore[no-untyped-call]
    return y_ND


def unsupported(device: torch.device, dtype: torch.dtype, d_model: int, d_expert: int) -> str | None:
    """Return the reason why `megablocks` cannot run with this device, dtype and widths, or None."""
    if device.type != "cuda" and not interpreted():
        return "it needs a CUDA device (tests run it in Triton's interpreter: TRITON_INTERPRET=1)"
    missing = [name for name in ("triton", "megablocks", "stk") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: run `make setup-gpu`"
    if d_model % BLOCK or d_expert % BLOCK:
        return f"model.d_model={d_model} and model.d_expert={d_expert} must be multiples of {BLOCK}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"its kernels do not support {dtype}"
    if device.type == "cuda" and not interpreted():
        rounds = "it would round float32 to TF32 on CUDA: set trainer.precision=bf16-mixed or experts=reference"
        return rounds if dtype == torch.float32 else None
    return "Triton's interpreter does not support bfloat16" if dtype == torch.bfloat16 else None


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU, for tests; the variable must be set before Triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def import_kernels() -> tuple[ModuleType, ModuleType]:
    """Import and return `megablocks.backend.kernels` and `stk.backend.triton_kernels`.

    MegaBlocks 0.10.0 imports its CUDA extension `megablocks_ops`, which does not compile under CUDA 13
    (databricks/megablocks, issue 180). The kernels used here are Triton's, so an empty module replaces it.
    """
    try:
        import megablocks_ops  # noqa: F401
    except ImportError:  # not installed, or built for another version of torch
        sys.modules["megablocks_ops"] = ModuleType("megablocks_ops")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Grouped GEMM not available")
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        import megablocks.backend.kernels
        import stk.backend.triton_kernels
    if interpreted():  # autotuning needs a driver, so keep one configuration per kernel
        for kernel in vars(megablocks.backend.kernels).values():
            if hasattr(kernel, "configs"):
                kernel.configs = kernel.configs[:1]
    return megablocks.backend.kernels, stk.backend.triton_kernels


def _every_slot(plan: RoutingPlan) -> tuple[Tensor, Tensor]:
    """Return order and ends of all N*K slots; slots without a row have weight 0 and go to the last expert."""
    order_R, ends_E = plan.order_R, plan.ends_E
    if len(order_R) == plan.weights_NK.numel():
        return order_R, ends_E
    absent = torch.ones(plan.weights_NK.numel(), dtype=torch.bool, device=order_R.device)
    absent[order_R] = False
    ends_E = ends_E.clone()
    ends_E[-1] = plan.weights_NK.numel()
    return torch.cat([order_R, absent.nonzero()[:, 0]]), ends_E


class _Rows:
    """Positions of the routed rows among the rows padded per expert, as int32 for MegaBlocks' copies."""

    def __init__(self, order_R: Tensor, ends_E: Tensor, top_k: int) -> None:
        rows_R = torch.arange(len(order_R), dtype=torch.int32, device=order_R.device)
        self.order_R, self.ends_E, self.top_k = order_R.int(), ends_E, top_k
        self.expert_R = torch.searchsorted(ends_E, rows_R, right=True).int()
        self.blocks_E = (torch.diff(ends_E, prepend=ends_E.new_zeros(1)) + BLOCK - 1) // BLOCK
        self.padded_ends_E = (self.blocks_E * BLOCK).cumsum(0).int()

    @property
    def padded_row_R(self) -> Tensor:
        """The padded row, in [0, G), of each routed row, (R,)."""
        begin_E, padded_begin_E = (F.pad(ends, (1, 0))[:-1] for ends in (self.ends_E, self.padded_ends_E))
        rows_R = torch.arange(len(self.order_R), device=self.order_R.device)
        return rows_R + (padded_begin_E - begin_E)[self.expert_R.long()]

    def gather(self, x_ND: Tensor) -> Tensor:
        """Copy tokens to padded rows, (G, D), with zeros as padding. G depends on the routing, so this synchronizes."""
        padded_GD: Tensor = import_kernels()[0].padded_gather(
            x_ND, self.order_R, self.expert_R, None, self.ends_E, self.padded_ends_E, self.top_k
        )
        return padded_GD

    def scatter(self, x_GD: Tensor, p_R: Tensor | None) -> Tensor:
        """Return the sum over each token's rows, (N, D), weighted by `p_R` (in slot order) if given."""
        y_ND: Tensor = import_kernels()[0].padded_scatter(
            x_GD, self.order_R, self.expert_R, p_R, self.ends_E, self.padded_ends_E, self.top_k
        )
        return y_ND


def _gate_up(blocks_ZTT: Tensor, cols: int) -> tuple[Tensor, Tensor]:
    """Split blocks into gate and up: a block row holds `cols` gate blocks followed by `cols` up blocks."""
    gate, up = blocks_ZTT.view(-1, 2, cols, BLOCK, BLOCK).unbind(1)
    return gate, up


class _BlockSparseSwiGLU(torch.autograd.Function):
    """Autograd function of `megablocks`. It saves only x and the gate and up pre-activations."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, p_NK: Tensor, w13: Tensor, w2: Tensor, order_R: Tensor, ends_E: Tensor
    ) -> Tensor:
        E, _, width, D = w13.shape
        x_ND, w13, w2 = x_ND.contiguous(), w13.contiguous(), w2.contiguous()  # as the kernels assume
        rows = _Rows(order_R, ends_E, p_NK.shape[1])
        x_GD = rows.gather(x_ND)
        wide, narrow = (Topology(rows.blocks_E, len(x_GD), m) for m in (2 * width, width))
        gate_up = wide.sdd(x_GD, w13.view(E * 2 * width, D).T)
        gate, up = _gate_up(gate_up, width // BLOCK)
        out_GD = narrow.dsd((F.silu(gate) * up).view(-1, BLOCK, BLOCK), w2.view(E * width, D))
        ctx.save_for_backward(x_ND, p_NK, w13, w2, gate_up)
        ctx.rows, ctx.wide, ctx.narrow = rows, wide, narrow
        return rows.scatter(out_GD, p_NK.reshape(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, p_NK, w13, w2, gate_up = ctx.saved_tensors
        rows, wide, narrow = ctx.rows, ctx.wide, ctx.narrow
        E, _, width, D = w13.shape
        cols = width // BLOCK
        dy_GD = rows.gather(dy_ND.contiguous())
        dh = narrow.sdd(dy_GD, w2.view(E * width, D).T).view(-1, cols, BLOCK, BLOCK)  # before the multiplication by p
        gate, up = _gate_up(gate_up, cols)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        h = silu * up
        slot_R, row_R = rows.order_R.long(), rows.padded_row_R
        dp_R = torch.empty_like(p_NK, memory_format=torch.contiguous_format).view(-1)
        dp_R[slot_R] = (h.float() * dh.float()).sum((1, 3)).view(-1)[row_R].to(p_NK.dtype)
        p_G = h.new_zeros(len(dy_GD))
        p_G[row_R] = p_NK.reshape(-1)[slot_R].to(h.dtype)
        p_blocks = p_G.view(-1, 1, BLOCK, 1)
        dw2 = narrow.dsd((h * p_blocks).view(-1, BLOCK, BLOCK), dy_GD, transpose=True).view_as(w2)
        dh = dh * p_blocks
        dgate_up = torch.stack([dh * up * (sigmoid + silu * (1 - sigmoid)), dh * silu], 1).view(-1, BLOCK, BLOCK)
        dw13 = wide.dsd(dgate_up, rows.gather(x_ND), transpose=True).view_as(w13)
        dx_ND = rows.scatter(wide.dsd(dgate_up, w13.view(E * 2 * width, D)), None)
        return dx_ND, dp_R.view_as(p_NK), dw13, dw2, None, None


class Topology:
    """A block-sparse (G, E*M) matrix: each block row holds only the M/128 blocks of its expert.

    SDD gets int32 indices. Since Triton 3.2 the kernel's `int16 * 128` stays int16, so blocks from 256 on are wrong
    (stanford-futuredata/stk, pull request 17). DSD gets int16: it widens before it multiplies, and int32 would
    halve its pipeline (shared memory 64 to 32 KiB, 4 stages to 2).
    """

    def __init__(self, blocks_E: Tensor, num_rows: int, width: int) -> None:
        """Lay out `blocks_E` block rows per expert, `num_rows` rows in total; each expert has `width` (M) columns."""
        device, rows, cols = blocks_E.device, num_rows // BLOCK, width // BLOCK
        if num_rows * width >= INT32_ELEMENTS:
            raise UserError(
                f"experts.backend=megablocks cannot hold {num_rows} rows of {width} features, as its kernels index "
                "elements with 32 bits: use a smaller trainer.micro_batch"
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
        # M/128 equal block columns per expert; repeat_interleave would synchronize with the GPU
        blocks_of_column = blocks_E[:, None].expand(-1, cols).reshape(-1)
        self.begin_of_column = F.pad(blocks_of_column.cumsum(0), (1, 0)).int()
        self.by_column_Z = by_column_Z.int()

    def sdd(self, a_GJ: Tensor, b_JM: Tensor) -> Tensor:
        """Return the blocks, (Z, T, T), of a dense product; `b_JM` has the columns of all experts."""
        out_ZTT = a_GJ.new_empty(len(self.row_Z), BLOCK, BLOCK)
        import_kernels()[1].sdd(a_GJ, b_JM, self.shape, out_ZTT, self.begin_of_row, self.row_Z, self.column_Z)
        return out_ZTT

    def dsd(self, blocks_ZTT: Tensor, b: Tensor, transpose: bool = False) -> Tensor:
        """Return the blocks, or their transpose, times the dense matrix `b`."""
        shape = self.shape[::-1] if transpose else self.shape
        out = b.new_empty(shape[0], b.shape[1])
        import_kernels()[1].dsd(
            shape, blocks_ZTT, self.begin_of_row, self.row_Z, self.short_column_Z,
            self.begin_of_column, self.short_row_by_column_Z, self.by_column_Z, transpose, b, out,
        )  # fmt: skip
        return out
