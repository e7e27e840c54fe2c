"""Triton kernels of the backend `fused` for the gradients of the weights: cut long experts, then add the pieces.

Reference: split-k matrix products with a second pass over the partial sums instead of atomics, so that bits repeat.
Shapes: N tokens, E experts, K experts per token, R = N*K routed rows sorted by expert, T chunks, S partial sums,
I and J the widths of a matrix.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_chunks", "chunk_rows"])
def weight_grad_kernel(
    a_RI, b_NJ, dw_EIJ, partial_SIJ, order_R, ends_E, chunks_3T, num_chunks, chunk_rows,
    WIDTH_I: tl.constexpr, WIDTH_J: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute dW_e, the sum over e's rows r of a_r^T b[token of r].

    For a long expert it is the part of one chunk, in fp32.
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
    """Sum the partial sums of dW_e of an expert in several chunks, always in the same order."""
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
