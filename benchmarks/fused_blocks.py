"""Device time of each kernel of `fused` by block shape: python -m benchmarks.fused_blocks [--widths 768]

Every shape is compiled and compared with `reference`, many at once in separate processes. Correct shapes are then timed
one after another, on balanced and on skewed routing. SMOKE=1 is a dry run on a CPU; its numbers are meaningless.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

SMOKE = os.environ.get("SMOKE") == "1"
if SMOKE:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch  # noqa: E402

from benchmarks.gpu.layers import Case, Ours, Shape, errors, make_case, step, wanted  # noqa: E402
from benchmarks.gpu.timing import time_layer  # noqa: E402
from simbal.experts import fused  # noqa: E402
from simbal.experts.fused import CONFIGS, Blocks  # noqa: E402

DEVICE, DTYPE = (torch.device("cpu"), torch.float32) if SMOKE else (torch.device("cuda"), torch.bfloat16)
SHARED_OF_AN_SM = 227 * 1024
OPERANDS = {"up": 2, "down": 1, "hidden_grad": 1, "weight_grad": 1}
"""Weight tiles that a kernel loads per step of its inner loop, in addition to one tile of rows; keys as in `Config`."""


def candidates(kernel: str) -> Iterator[Blocks]:
    """Return block shapes whose tiles fit into the shared memory of one SM, for tiles of 128 rows."""
    columns = (64, 128) if kernel in ("up", "hidden_grad") else (64, 128, 256)
    for width, depth, warps, stages in itertools.product(columns, (64, 128), (4, 8), (2, 3, 4, 5)):
        shared = stages * 2 * depth * (128 + OPERANDS[kernel] * width)
        accumulators = 128 * width * OPERANDS[kernel] // (32 * warps)
        if shared <= SHARED_OF_AN_SM and accumulators <= 128:
            yield Blocks(width, depth, warps, stages)


def use(kernel: str, blocks: Blocks) -> None:
    """Make `fused` use these blocks in one kernel for any widths."""
    changed: dict[str, Any] = {kernel: blocks}
    config = replace(CONFIGS[0], **changed)
    fused.config_for = lambda *_: config


@functools.cache
def case_of(width: int, routing: str, tokens: int) -> Case:
    """Return a layer with d_model = d_expert."""
    return make_case(Shape("", tokens, width, width, *((4, 2) if SMOKE else (32, 4))), routing, DEVICE, DTYPE)


@functools.cache
def expected(width: int, routing: str, tokens: int) -> list[torch.Tensor]:
    """Return the output and gradients of `reference`."""
    return wanted(case_of(width, routing, tokens))


def checked(width: int, kernel: str, blocks: Blocks) -> float | str:
    """Return the largest error of a layer with these blocks, or why it did not run; compiled kernels are cached."""
    use(kernel, blocks)
    layer = width, "skewed", 24 if SMOKE else 2048
    try:
        return max(errors(step(Ours("fused"), case_of(*layer)), expected(*layer)).values())
    except Exception as error:  # for example, too much shared memory
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"


def device_ms(width: int, routing: str, kernel: str, blocks: Blocks, tokens: int) -> float:
    """Return the kernel's milliseconds in one forward and backward pass."""
    use(kernel, blocks)
    case, layer = case_of(width, routing, tokens), Ours("fused")
    if SMOKE:
        return time_layer(layer, case, DEVICE, 1).total
    for _ in range(3):
        step(layer, case)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            step(layer, case)
        torch.cuda.synchronize()
    mine = [e for e in profile.key_averages() if e.key.startswith(f"{kernel}_kernel")]
    return float(sum(e.self_device_time_total for e in mine)) / 1e4


def main() -> None:
    """Check, time and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[768, 1536], help="d_model and d_expert")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--kernels", nargs="+", default=list(OPERANDS))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    args = parser.parse_args()
    tried = [(w, kernel, blocks) for w in args.widths for kernel in args.kernels for blocks in candidates(kernel)]
    if SMOKE:
        tried = [(256, kernel, getattr(CONFIGS[0], kernel)) for kernel in args.kernels]
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(checked, *zip(*tried, strict=True)))
    print("| width | kernel | columns, depth, warps, stages | error | balanced ms | skewed ms |")
    print("|---:|---|---|---:|---:|---:|")
    for (width, kernel, blocks), error in zip(tried, found, strict=True):
        shown = f"{blocks.columns}, {blocks.depth}, {blocks.num_warps}, {blocks.num_stages}"
        shown += " (in use)" if blocks == getattr(CONFIGS[0], kernel) else ""
        if isinstance(error, str) or not error < 3e-2:
            print(f"| {width} | {kernel} | {shown} | {error} | | |", flush=True)
            continue
        tokens = 24 if SMOKE else args.tokens
        times = " | ".join(
            f"{device_ms(width, routing, kernel, blocks, tokens):.3f}" for routing in ("balanced", "skewed")
        )
        print(f"| {width} | {kernel} | {shown} | {error:.0e} | {times} |", flush=True)


if __name__ == "__main__":
    main()
