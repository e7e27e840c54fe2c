"""Triton kernels of the backend `fused`: matrix products with gather, activation and scatter fused in.

They mask rows but not columns and assume contiguous tensors, which `fused.py` checks. No kernel uses atomics, so
results are bit-reproducible.
Weight gradients are split-k products, with a second pass that adds the partial sums of long experts.
Reference: MegaBlocks (arXiv 2211.15841) and ScatterMoE (arXiv 2403.08245) for the gather and scatter inside the
product; SonicMoE for dp = <h, dy W2^T>; Triton's matrix multiplication tutorial for the grouped order of tiles.
Shapes: N tokens, D model width, E experts, F expert hidden width, K experts per token, R = N*K routed rows (sorted by
expert; unsorted if a name contains slot), T tiles or chunks, S partial sums, C column blocks, I and J the dimensions of
a matrix.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tiles", "size"])
def tile_map_kernel(ends_E, tiles_3T, num_tiles, size, E: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    """Write the expert, first row and partial-sum index of each tile; every expert is split into tiles of `size` rows.

    Surplus tiles have expert -1. LEAST = 1 gives an expert without rows one tile, which stores its zero gradient. The
    partial-sum index is -1 unless the expert has several tiles.
    """
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.full((BLOCK,), -1, tl.int32)
    first = tl.full((BLOCK,), 0, tl.int32)
    partial = tl.full((BLOCK,), -1, tl.int32)
    begin = 0
    tiles_before = 0
    partials_before = 0
    for e in range(E):
        end = tl.load(ends_E + e)
        tiles = tl.maximum((end - begin + size - 1) // size, LEAST)
        index = tile - tiles_before
        mine = (index >= 0) & (index < tiles)
        expert = tl.where(mine, e, expert)
        first = tl.where(mine, begin + index * size, first)
        partial = tl.where(mine & (tiles > 1), partials_before + index, partial)
        partials_before += tl.where(tiles > 1, tiles, 0)
        tiles_before += tiles
        begin = end
    mask = tile < num_tiles
    tl.store(tiles_3T + tile, expert, mask=mask)
    tl.store(tiles_3T + num_tiles + tile, first, mask=mask)
    tl.store(tiles_3T + 2 * num_tiles + tile, partial, mask=mask)


@triton.jit
def _row_tile(tiles_3T, ends_E, num_tiles, C: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Return this program's expert, its rows, a mask of the rows that belong to the expert, and its column block.

    Programs run approximately in this order, so GROUP row tiles use one column block of a weight while it is in L2.
    """
    pid = tl.program_id(0)
    group = pid // (GROUP * C)
    inside = pid % (GROUP * C)
    size = tl.minimum(num_tiles - group * GROUP, GROUP)
    tile = group * GROUP + inside % size
    expert = tl.load(tiles_3T + tile)
    row = tl.load(tiles_3T + num_tiles + tile) + tl.arange(0, ROWS)
    end = tl.load(ends_E + tl.maximum(expert, 0))
    return expert.to(tl.int64), row.to(tl.int64), row < end, inside // size


@triton.jit(do_not_specialize=["num_tiles"])
def up_kernel(
    x_ND, w13_E2FD, gate_up_R2F, h_RF, order_R, ends_E, tiles_3T, num_tiles,
    D: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute gate, up = x[token] W13_e^T and h = silu(gate) * up."""
    expert, row_R, mine_R, column = _row_tile(tiles_3T, ends_E, num_tiles, F // COLUMNS, ROWS, GROUP)
    if expert >= 0:
        token_R = tl.load(order_R + row_R, mask=mine_R, other=0).to(tl.int64) // K
        f = column * COLUMNS + tl.arange(0, COLUMNS)
        d = tl.arange(0, DEPTH)
        x_at = x_ND + token_R[:, None] * D + d[None, :]
        gate_at = w13_E2FD + expert * (2 * F * D) + f[None, :] * D + d[:, None]
        up_at = gate_at + F * D
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for _ in range(D // DEPTH):
            x = tl.load(x_at, mask=mine_R[:, None], other=0.0)
            gate = tl.dot(x, tl.load(gate_at), gate)
            up = tl.dot(x, tl.load(up_at), up)
            x_at += DEPTH
            gate_at += DEPTH
            up_at += DEPTH
        dtype = h_RF.dtype.element_ty
        gate = gate.to(dtype)  # compute h from the rounded values, which the backward pass uses too
        up = up.to(dtype)
        at = gate_up_R2F + row_R[:, None] * (2 * F) + f[None, :]
        tl.store(at, gate, mask=mine_R[:, None])
        tl.store(at + F, up, mask=mine_R[:, None])
        gate32 = gate.to(tl.float32)
        h = gate32 * tl.sigmoid(gate32) * up.to(tl.float32)
        tl.store(h_RF + row_R[:, None] * F + f[None, :], h.to(dtype), mask=mine_R[:, None])


@triton.jit(do_not_specialize=["num_tiles"])
def down_kernel(
    a_RI, w_EIJ, p_slot, out_slotJ, order_R, ends_E, tiles_3T, num_tiles,
    WIDTH_I: tl.constexpr, WIDTH_J: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute out[slot] = p[slot] * a W_e if SCALED (the down projection), else out[slot] = a W_e (dx)."""
    expert, row_R, mine_R, column = _row_tile(tiles_3T, ends_E, num_tiles, WIDTH_J // COLUMNS, ROWS, GROUP)
    if expert >= 0:
        j = column * COLUMNS + tl.arange(0, COLUMNS)
        i = tl.arange(0, DEPTH)
        a_at = a_RI + row_R[:, None] * WIDTH_I + i[None, :]
        w_at = w_EIJ + expert * (WIDTH_I * WIDTH_J) + i[:, None] * WIDTH_J + j[None, :]
        out = tl.zeros((ROWS, COLUMNS), tl.float32)
        for _ in range(WIDTH_I // DEPTH):
            out = tl.dot(tl.load(a_at, mask=mine_R[:, None], other=0.0), tl.load(w_at), out)
            a_at += DEPTH
            w_at += DEPTH * WIDTH_J
        slot_R = tl.load(order_R + row_R, mask=mine_R, other=0).to(tl.int64)
        if SCALED:
            out *= tl.load(p_slot + slot_R, mask=mine_R, other=0.0).to(tl.float32)[:, None]
        at = out_slotJ + slot_R[:, None] * WIDTH_J + j[None, :]
        tl.store(at, out.to(out_slotJ.dtype.element_ty), mask=mine_R[:, None])


@triton.jit
def _swiglu_grad(g, p_R, gate_up_R2F, dgate_up_R2F, ph_RF, row_R, mine_R, f, F: tl.constexpr):
    """Store dgate, dup and ph for the columns `f`, and return <h, g> over these columns.

    silu'(gate) = sigmoid + silu * (1 - sigmoid).
    """
    mine = mine_R[:, None]
    at = row_R[:, None] * (2 * F) + f[None, :]
    gate = tl.load(gate_up_R2F + at, mask=mine, other=0.0).to(tl.float32)
    up = tl.load(gate_up_R2F + at + F, mask=mine, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    h = silu * up
    p = p_R[:, None]
    dh = g * p
    dtype = ph_RF.dtype.element_ty
    dgate = dh * up * (sigmoid + silu * (1 - sigmoid))
    tl.store(dgate_up_R2F + at, dgate.to(dtype), mask=mine)
    tl.store(dgate_up_R2F + at + F, (dh * silu).to(dtype), mask=mine)
    tl.store(ph_RF + row_R[:, None] * F + f[None, :], (h * p).to(dtype), mask=mine)
    return tl.sum(h * g, 1)


@triton.jit(do_not_specialize=["num_tiles"])
def hidden_grad_kernel(
    dy_ND, w2_EFD, gate_up_R2F, p_slot, dgate_up_R2F, ph_RF, dp_slotC, order_R, ends_E, tiles_3T, num_tiles,
    D: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute g = dy[token] W2_e^T and the gradients that depend on it.

    dp = <h, g>, one partial sum per column block; dh = p g; ph = p h; dgate and dup follow from dh.
    """
    expert, row_R, mine_R, column = _row_tile(tiles_3T, ends_E, num_tiles, F // COLUMNS, ROWS, GROUP)
    if expert >= 0:
        slot_R = tl.load(order_R + row_R, mask=mine_R, other=0).to(tl.int64)
        f = column * COLUMNS + tl.arange(0, COLUMNS)
        d = tl.arange(0, DEPTH)
        dy_at = dy_ND + (slot_R // K)[:, None] * D + d[None, :]
        w2_at = w2_EFD + expert * (F * D) + f[None, :] * D + d[:, None]
        g = tl.zeros((ROWS, COLUMNS), tl.float32)
        for _ in range(D // DEPTH):
            g = tl.dot(tl.load(dy_at, mask=mine_R[:, None], other=0.0), tl.load(w2_at), g)
            dy_at += DEPTH
            w2_at += DEPTH
        p_R = tl.load(p_slot + slot_R, mask=mine_R, other=0.0).to(tl.float32)
        # process half of the columns at a time: a full tile would not fit into the registers
        left, right = tl.split(g.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1))
        f = column * COLUMNS + tl.arange(0, COLUMNS // 2)
        dp_R = _swiglu_grad(left, p_R, gate_up_R2F, dgate_up_R2F, ph_RF, row_R, mine_R, f, F)
        f += COLUMNS // 2
        dp_R += _swiglu_grad(right, p_R, gate_up_R2F, dgate_up_R2F, ph_RF, row_R, mine_R, f, F)
        tl.store(dp_slotC + slot_R * (F // COLUMNS) + column, dp_R, mask=mine_R)


@triton.jit(do_not_specialize=["num_chunks", "chunk_rows"])
def weight_grad_kernel(
    a_RI, b_NJ, dw_EIJ, partial_SIJ, order_R, ends_E, chunks_3T, num_chunks, chunk_rows,
    WIDTH_I: tl.constexpr, WIDTH_J: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute dW_e, the sum over the rows r of expert e of a_r^T b[token of r].

    For an expert with several chunks, store the fp32 partial sum of one chunk.
    """
    tile = tl.program_id(0)
    chunk = tl.program_id(1)
    expert = tl.load(chunks_3T + chunk)
    if expert >= 0:
        begin = tl.load(chunks_3T + num_chunks + chunk)
        partial = tl.load(chunks_3T + 2 * num_chunks + chunk)
        end = tl.minimum(begin + chunk_rows, tl.load(ends_E + expert))
        i = tile // (WIDTH_J // COLUMNS) * ROWS + tl.arange(0, ROWS)
        j = tile % (WIDTH_J // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
        dw = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(begin, end, DEPTH):
            row = first + tl.arange(0, DEPTH)
            mine = row < end
            token = tl.load(order_R + row, mask=mine, other=0).to(tl.int64) // K
            a = tl.load(a_RI + row.to(tl.int64)[None, :] * WIDTH_I + i[:, None], mask=mine[None, :], other=0.0)
            b = tl.load(b_NJ + token[:, None] * WIDTH_J + j[None, :], mask=mine[:, None], other=0.0)
            dw = tl.dot(a, b, dw)
        at = i[:, None] * WIDTH_J + j[None, :]
        if partial >= 0:
            tl.store(partial_SIJ + partial.to(tl.int64) * (WIDTH_I * WIDTH_J) + at, dw)
        else:
            tl.store(dw_EIJ + expert.to(tl.int64) * (WIDTH_I * WIDTH_J) + at, dw.to(dw_EIJ.dtype.element_ty))


@triton.jit(do_not_specialize=["chunk_rows"])
def sum_partials_kernel(partial_SIJ, dw_EIJ, ends_E, chunk_rows, IJ: tl.constexpr, BLOCK: tl.constexpr):
    """Add the partial sums of dW_e for experts with several chunks, in a fixed order."""
    expert = tl.program_id(1)
    begin = tl.load(ends_E + expert - 1, mask=expert > 0, other=0)
    chunks = (tl.load(ends_E + expert) - begin + chunk_rows - 1) // chunk_rows
    if chunks > 1:
        first = tl.full((), 0, tl.int64)
        previous = 0
        for e in range(expert):
            end = tl.load(ends_E + e)
            before = (end - previous + chunk_rows - 1) // chunk_rows
            first += tl.where(before > 1, before, 0)
            previous = end
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        dw = tl.zeros((BLOCK,), tl.float32)
        partial_at = partial_SIJ + first * IJ + at
        for _ in range(chunks):
            dw += tl.load(partial_at, mask=at < IJ, other=0.0)
            partial_at += IJ
        tl.store(dw_EIJ + expert.to(tl.int64) * IJ + at, dw.to(dw_EIJ.dtype.element_ty), mask=at < IJ)
