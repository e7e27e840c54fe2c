"""Backend `megablocks`: MegaBlocks' padded copies and stk's block-sparse products, with a backward that keeps little.

MegaBlocks itself has no memory-optimised block-sparse GLU (it raises NotImplementedError); this is one. Its routing,
its Arguments and its modules are not used. Each layer waits for the device three times, once per padded gather.
Reference: MegaBlocks (arXiv 2211.15841); SonicMoE for the router gradient <h, dy W2^T>, which needs no expert output.
Shapes: N tokens, D model width, E experts, F expert hidden width, K experts per token, R = N*K routed rows,
G rows padded to blocks of 128 per expert, Z blocks of T x T.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from simbal.experts.megablocks_ops import interpreted, kernels
from simbal.experts.megablocks_topology import BLOCK, Topology
from simbal.experts.plan import RoutingPlan


def megablocks(x_ND: Tensor, plan: RoutingPlan, w13_E2FD: Tensor, w2_EFD: Tensor) -> Tensor:
    """The same function as `reference`."""
    if not x_ND.dtype == w13_E2FD.dtype == w2_EFD.dtype:  # a kernel would read one as the other
        raise ValueError(f"x, w13 and w2 must have one dtype, got {x_ND.dtype}, {w13_E2FD.dtype} and {w2_EFD.dtype}")
    y_ND: Tensor = _BlockSparseSwiGLU.apply(x_ND, plan.weights_NK, w13_E2FD, w2_EFD, *_every_slot(plan))  # type: ignore[no-untyped-call]
    return y_ND


def unsupported(device: torch.device, dtype: torch.dtype, d_model: int, d_expert: int) -> str | None:
    """Why `megablocks` cannot run, or None."""
    if device.type != "cuda" and not interpreted():
        return "it needs a CUDA device (or, for tests, TRITON_INTERPRET=1)"
    missing = [name for name in ("triton", "megablocks", "stk") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: run `make setup-gpu`"
    if d_model % BLOCK or d_expert % BLOCK:
        return f"model.d_model={d_model} and model.d_expert={d_expert} must be multiples of {BLOCK}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"its kernels have no {dtype}"
    if device.type == "cuda" and not interpreted():
        exact = "experts=reference for float32"
        return None if dtype != torch.float32 else (
            f"its products would round float32 to TF32 on CUDA: set trainer.precision=bf16-mixed, or {exact}"
        )  # fmt: skip
    return "the Triton interpreter multiplies bfloat16 wrongly" if dtype == torch.bfloat16 else None


def _every_slot(plan: RoutingPlan) -> tuple[Tensor, Tensor]:
    """Order and ends with all N*K slots: one without a row has weight 0 and may go to any expert."""
    order_R, ends_E = plan.order_R, plan.ends_E
    if len(order_R) == plan.weights_NK.numel():
        return order_R, ends_E
    absent = torch.ones(plan.weights_NK.numel(), dtype=torch.bool, device=order_R.device)
    absent[order_R] = False
    ends_E = ends_E.clone()
    ends_E[-1] = plan.weights_NK.numel()
    return torch.cat([order_R, absent.nonzero()[:, 0]]), ends_E


@dataclass(frozen=True)
class _Rows:
    """Where each routed row goes among rows padded per expert, in the int32 that MegaBlocks' copies read."""

    order_R: Tensor
    expert_R: Tensor
    ends_E: Tensor
    padded_ends_E: Tensor
    top_k: int

    @classmethod
    def build(cls, order_R: Tensor, ends_E: Tensor, top_k: int) -> "_Rows":
        rows_R = torch.arange(len(order_R), dtype=torch.int32, device=order_R.device)
        expert_R = torch.searchsorted(ends_E, rows_R, right=True).int()
        counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
        padded_ends_E = ((counts_E + BLOCK - 1) // BLOCK * BLOCK).cumsum(0).int()
        return cls(order_R.int(), expert_R, ends_E, padded_ends_E, top_k)

    @property
    def blocks_E(self) -> Tensor:
        return torch.diff(self.padded_ends_E, prepend=self.padded_ends_E.new_zeros(1)) // BLOCK

    @property
    def padded_row_R(self) -> Tensor:
        """Row of G of each routed row."""
        begin_E, padded_begin_E = (F.pad(ends, (1, 0))[:-1] for ends in (self.ends_E, self.padded_ends_E))
        rows_R = torch.arange(len(self.order_R), device=self.order_R.device)
        return rows_R + (padded_begin_E - begin_E)[self.expert_R.long()]

    def gather(self, x_ND: Tensor) -> Tensor:
        """(G, D), padding 0; waits for the device, because the number of rows depends on the routing."""
        padded_GD: Tensor = kernels()[0].padded_gather(
            x_ND, self.order_R, self.expert_R, None, self.ends_E, self.padded_ends_E, self.top_k
        )
        return padded_GD

    def scatter(self, x_GD: Tensor, p_R: Tensor | None) -> Tensor:
        """(N, D): the sum over each token's rows, with weights in the order of the slots."""
        y_ND: Tensor = kernels()[0].padded_scatter(
            x_GD, self.order_R, self.expert_R, p_R, self.ends_E, self.padded_ends_E, self.top_k
        )
        return y_ND


def _gate_up(blocks_ZTT: Tensor, cols: int) -> tuple[Tensor, Tensor]:
    """Each block row holds `cols` gate blocks, then `cols` up blocks."""
    gate, up = blocks_ZTT.view(-1, 2, cols, BLOCK, BLOCK).unbind(1)
    return gate, up


class _BlockSparseSwiGLU(torch.autograd.Function):
    """Saves x and the gate and up pre-activations only: no gathered x, hidden state or expert output."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, p_NK: Tensor, w13: Tensor, w2: Tensor, order_R: Tensor, ends_E: Tensor
    ) -> Tensor:
        E, _, width, D = w13.shape
        x_ND, w13, w2 = x_ND.contiguous(), w13.contiguous(), w2.contiguous()  # the kernels assume it
        rows = _Rows.build(order_R, ends_E, p_NK.shape[1])
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
        dh = narrow.sdd(dy_GD, w2.view(E * width, D).T).view(-1, cols, BLOCK, BLOCK)  # before the routing weight
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
