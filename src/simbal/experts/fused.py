"""Backend `fused`: Triton kernels that gather, activate and scatter inside the matrix products.

No padding, no permuted copy of x or dy, no atomics and no synchronization with the host, so a CUDA graph can capture
it. Equal inputs give equal bits: every sum has a fixed order, and block shapes come from the static table `CONFIGS`.
Autotuning at run time would make the order of the sums, and so the bits, depend on timing.
Not tried: a persistent grid, TMA, warp specialization.
Reference: MegaBlocks (arXiv 2211.15841) for the weight layout; SonicMoE for the router gradient <h, dy W2^T>.
Shapes: N tokens, D model width, E experts, F expert hidden width, K experts per token, R = N*K routed rows, T tiles,
C column blocks, S partial sums, I and J the dimensions of a matrix.
"""

import importlib.util
import os
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from simbal.experts.backends import RoutingPlan


@dataclass(frozen=True)
class Blocks:
    """Block shape of one kernel: columns of a tile, steps of the sum per iteration, and Triton's launch options."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Config:
    """Block shapes of all kernels for widths that are multiples of `width`."""

    width: int
    up: Blocks  # columns of gate and up each
    down: Blocks
    hidden_grad: Blocks
    weight_grad: Blocks
    weight_rows: int  # rows per tile of the weight gradient
    shared_memory: int  # bytes per program of the most demanding kernel
    rows: int = 128  # rows per tile of the three kernels over routed rows, which share one tile map
    group: int = 16  # row tiles per column sweep: 16 tiles read 3 MB of x at D = 768, and L2 holds 50 MB
    programs: int = 4 * 132  # target number of programs for the weight gradient: four per SM of an H200
    min_chunk: int = 512  # rows; splitting an expert into shorter chunks costs more in partial sums than it gains

    def chunk_rows(self, R: int, tiles: int) -> int:
        """Return the rows per chunk at which the weight gradient splits long experts, so that none delays the GPU.

        R rows with `tiles` tiles give R/chunk_rows * tiles = `programs` chunks. Balanced experts fit into one chunk
        where the weights fill a GPU. Partial sums fit into 2 * `programs` tiles (66 MiB of fp32) for any model.
        """
        rows = max(self.min_chunk, R * tiles // self.programs)
        return -(-rows // self.weight_grad.depth) * self.weight_grad.depth


# In order of preference. Only the first entry was timed on a GPU, an H100 (`benchmarks.fused_blocks`). The
# tests compile each for sm_90, and for sm_80 if it fits, and check that no registers spill and, for the entries without
# timings, that two programs fit onto one SM of an H200 (128 registers, 113 KiB of shared memory), so that one program
# stores while the other multiplies.
CONFIGS = (
    Config(
        width=256,
        up=Blocks(64, 64, num_warps=8, num_stages=3),
        down=Blocks(256, 64, num_warps=8, num_stages=4),
        hidden_grad=Blocks(128, 64, num_warps=8, num_stages=5),
        weight_grad=Blocks(128, 64, num_warps=8, num_stages=5),  # loading the tokens' order takes two stages
        weight_rows=128,
        shared_memory=200 * 1024,
    ),
    Config(
        width=128,
        up=Blocks(64, 64, num_warps=8, num_stages=3),
        down=Blocks(128, 64, num_warps=8, num_stages=3),
        hidden_grad=Blocks(64, 64, num_warps=8, num_stages=4),
        weight_grad=Blocks(128, 64, num_warps=8, num_stages=5),
        weight_rows=128,
        shared_memory=97 * 1024,
    ),
    Config(
        width=64,
        up=Blocks(64, 64, num_warps=8, num_stages=3),
        down=Blocks(64, 64, num_warps=8, num_stages=4),
        hidden_grad=Blocks(64, 64, num_warps=8, num_stages=4),
        weight_grad=Blocks(64, 64, num_warps=4, num_stages=5),
        weight_rows=64,
        shared_memory=97 * 1024,
    ),
)


def config_for(d_model: int, d_expert: int, shared_memory: float = inf) -> Config | None:
    """Return the first config whose width divides both widths and that fits into the shared memory, or None."""
    fitting = (c for c in CONFIGS if d_model % c.width == d_expert % c.width == 0 and c.shared_memory <= shared_memory)
    return next(fitting, None)


def fused(x_ND: Tensor, plan: RoutingPlan, w13_E2FD: Tensor, w2_EFD: Tensor) -> Tensor:
    """Compute the experts, (N, D), with Triton kernels."""
    y_ND: Tensor = _FusedSwiGLU.apply(x_ND, plan.weights_NK, w13_E2FD, w2_EFD, plan.order_R, plan.ends_E)  # type: ignore[no-untyped-call]
    return y_ND


def unsupported(device: torch.device, dtype: torch.dtype, d_model: int, d_expert: int) -> str | None:
    """Return the reason why `fused` cannot run with this device, dtype and widths, or None."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and device.type != "cuda":
        return f"it needs CUDA, not {device.type} (tests run it in Triton's interpreter: TRITON_INTERPRET=1)"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton==3.7.1"
    if config_for(d_model, d_expert) is None:
        multiple = min(config.width for config in CONFIGS)
        return f"model.d_model={d_model} and model.d_expert={d_expert} must be multiples of {multiple}"
    if interpreted:
        supported = dtype in (torch.float32, torch.float16)
        return None if supported else f"Triton's interpreter supports float32 and float16, not {dtype}"
    return _unsupported_on_gpu(device, dtype, d_model, d_expert)


def _unsupported_on_gpu(device: torch.device, dtype: torch.dtype, d_model: int, d_expert: int) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16):
        why = ", which Triton multiplies as TF32" if dtype == torch.float32 else ""
        return f"on CUDA it needs bfloat16 or float16, not {dtype}{why}: set trainer.precision=bf16-mixed"
    memory = _shared_memory(device)
    if config_for(d_model, d_expert, memory) is None:
        least = min(config.shared_memory for config in CONFIGS)
        return f"a program needs {least} bytes of shared memory, but this GPU has {memory}"
    return None


def _shared_memory(device: torch.device) -> float:
    """Return the bytes of shared memory available to a program, infinity without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return inf
    memory: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return memory


def _checked_config(x_ND: Tensor, w13: Tensor, w2: Tensor) -> Config:
    """Return the config; `ValueError` unless the weights are contiguous and of one dtype, as the kernels assume."""
    _, _, width, D = w13.shape
    if not x_ND.dtype == w13.dtype == w2.dtype:
        raise ValueError(f"x, w13 and w2 must have one dtype, got {x_ND.dtype}, {w13.dtype} and {w2.dtype}")
    if not (w13.is_contiguous() and w2.is_contiguous()):
        raise ValueError(f"w13 and w2 must be contiguous, got strides {w13.stride()} and {w2.stride()}")
    if (config := config_for(D, width, _shared_memory(x_ND.device))) is None:
        raise ValueError(f"no block shapes for weights of widths {D} and {width}")
    return config


def _tile_map(ends: Tensor, R: int, rows: int, least: int) -> Tensor:
    """Run `tile_map_kernel`, (3, T). T is an upper bound that does not depend on the counts; surplus tiles are idle."""
    from simbal.experts import fused_kernels as kernels

    E, block = len(ends), 128
    tiles_3T = ends.new_empty(3, R // rows + E)
    T = tiles_3T.shape[1]
    kernels.tile_map_kernel[(-(-T // block),)](ends, tiles_3T, T, rows, E=E, LEAST=least, BLOCK=block, num_warps=4)
    return tiles_3T


def _new_slots(like: Tensor, order: Tensor, N: int, K: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory for a kernel's output per slot, (N, K, width). It is zero if the plan omits slots."""
    new = like.new_empty if len(order) == N * K else like.new_zeros
    return new((N, K, width), dtype=dtype)


def _run_rows(kernel: Any, config: Config, blocks: Blocks, columns: int, *tensors: Tensor, **sizes: int) -> None:
    """Run a kernel over routed rows: one program per row tile and column block. The last tensor is the tile map."""
    T = tensors[-1].shape[1]
    kernel[(T * (columns // blocks.columns),)](
        *tensors, T, **sizes,
        ROWS=config.rows, COLUMNS=blocks.columns, DEPTH=blocks.depth, GROUP=config.group, **blocks.options,
    )  # fmt: skip


def _weight_grad(
    config: Config, a_RI: Tensor, b_NJ: Tensor, weight: Tensor, order: Tensor, ends: Tensor, K: int
) -> Tensor:
    """Return the gradient of `weight`: for each expert a_e^T times the b rows of its tokens; zero without rows."""
    from simbal.experts import fused_kernels as kernels

    (R, width_i), width_j, blocks = a_RI.shape, b_NJ.shape[1], config.weight_grad
    tiles = (width_i // config.weight_rows) * (width_j // blocks.columns)
    chunk_rows = config.chunk_rows(R, tiles)
    chunks_3T = _tile_map(ends, R, chunk_rows, least=1)
    dw = torch.empty_like(weight)
    # an expert of n > chunk_rows rows has fewer than 2n / chunk_rows chunks
    partial_SIJ = a_RI.new_empty(2 * R // chunk_rows, width_i, width_j, dtype=torch.float32)
    kernels.weight_grad_kernel[(tiles, chunks_3T.shape[1])](
        a_RI, b_NJ, dw, partial_SIJ, order, ends, chunks_3T, chunks_3T.shape[1], chunk_rows,
        WIDTH_I=width_i, WIDTH_J=width_j, K=K,
        ROWS=config.weight_rows, COLUMNS=blocks.columns, DEPTH=blocks.depth, **blocks.options,
    )  # fmt: skip
    if chunk_rows < R:  # an expert may have several chunks
        block, IJ = 2048, width_i * width_j
        kernels.sum_partials_kernel[(-(-IJ // block), len(ends))](
            partial_SIJ, dw, ends, chunk_rows, IJ=IJ, BLOCK=block, num_warps=4
        )
    return dw


class _FusedSwiGLU(torch.autograd.Function):
    """Autograd function of `fused`. It saves x and the gate and up pre-activations: no gathered x, h or output."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, p_NK: Tensor, w13: Tensor, w2: Tensor, order: Tensor, ends: Tensor) -> Tensor:
        from simbal.experts import fused_kernels as kernels

        config = _checked_config(x_ND, w13, w2)
        (N, K), (_, _, width, D) = p_NK.shape, w13.shape
        x_ND, p_NK = x_ND.contiguous(), p_NK.contiguous()
        tiles_3T = _tile_map(ends, N * K, config.rows, least=0)
        where = (order, ends, tiles_3T)
        gate_up_R2F = x_ND.new_empty(N * K, 2 * width)
        h_RF = x_ND.new_empty(N * K, width)
        up = (kernels.up_kernel, config, config.up, width)
        _run_rows(*up, x_ND, w13, gate_up_R2F, h_RF, *where, D=D, F=width, K=K)
        out_NKD = _new_slots(x_ND, order, N, K, D)
        down = (kernels.down_kernel, config, config.down, D)
        _run_rows(*down, h_RF, w2, p_NK, out_NKD, *where, WIDTH_I=width, WIDTH_J=D, SCALED=True)
        ctx.save_for_backward(x_ND, p_NK, w13, w2, gate_up_R2F, *where)
        ctx.config = config
        return out_NKD.sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor | None, ...]:
        from simbal.experts import fused_kernels as kernels

        x_ND, p_NK, w13, w2, gate_up_R2F, *where = ctx.saved_tensors
        config: Config = ctx.config
        order, ends, _ = where
        (N, K), (_, _, width, D) = p_NK.shape, w13.shape
        dy_ND = dy_ND.contiguous()  # the kernels read rows, which an expanded gradient does not store
        dgate_up_R2F = torch.empty_like(gate_up_R2F)
        ph_RF = x_ND.new_empty(N * K, width)
        dp_NKC = _new_slots(p_NK, order, N, K, width // config.hidden_grad.columns, torch.float32)
        back = (kernels.hidden_grad_kernel, config, config.hidden_grad, width)
        saved = (gate_up_R2F, p_NK)
        _run_rows(*back, dy_ND, w2, *saved, dgate_up_R2F, ph_RF, dp_NKC, *where, D=D, F=width, K=K)
        dx_NKD = _new_slots(x_ND, order, N, K, D)
        down = (kernels.down_kernel, config, config.down, D)
        _run_rows(*down, dgate_up_R2F, w13, p_NK, dx_NKD, *where, WIDTH_I=2 * width, WIDTH_J=D, SCALED=False)
        dw13 = _weight_grad(config, dgate_up_R2F, x_ND, w13, order, ends, K)
        dw2 = _weight_grad(config, ph_RF, dy_ND, w2, order, ends, K)
        return dx_NKD.sum(1), dp_NKC.sum(-1, dtype=p_NK.dtype), dw13, dw2, None, None
