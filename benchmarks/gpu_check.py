"""Correctness and speed of all expert backends on this GPU: make gpu-check (SMOKE=1: a dry run on a CPU).

First checks correctness and stops at the first wrong backend. Then times layers of MoE-M and MoE-L, compared with
MegaBlocks' own module and a dense layer with the same active parameters, and full training steps. Prints a Markdown
section; --write appends it to benchmarks/RESULTS.md. Needs no network and no data. SMOKE=1 runs the same code on small
shapes in Triton's interpreter; its numbers are meaningless.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

SMOKE = os.environ.get("SMOKE") == "1"
if SMOKE:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch  # noqa: E402

from benchmarks.gpu import report  # noqa: E402
from benchmarks.gpu.layers import ROUTINGS, Dense, Ours, Shape, Upstream, errors, make_case, step, wanted  # noqa: E402
from benchmarks.gpu.timing import Timing, matmul_peak, time_layer  # noqa: E402
from benchmarks.gpu.training import Step, smoke_shape, time_step  # noqa: E402
from simbal.analysis.flops import preset_shape  # noqa: E402
from simbal.errors import UserError, exit_on_user_error  # noqa: E402
from simbal.experts.select import BACKENDS, select_backend  # noqa: E402

RESULTS = Path(__file__).parent / "RESULTS.md"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
SMALL = Shape("small", 16, 128, 128, 2, 1)
OURS = ("torch", "megablocks", "fused")
UPSTREAM = {"MegaBlocks' module, sparse": "sparse", "MegaBlocks' module, grouped": "grouped"}


def check(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, str, float]]:
    """Yield (implementation, routing, largest error); `UserError` if an implementation is wrong or cannot run."""
    shape = SMALL if SMOKE else Shape("MoE-M", 4096, 768, 768, 32, 4)
    for name in OURS:
        select_backend(name, device, dtype, shape.D, shape.F)  # raises the reason
    for routing in ROUTINGS:
        case = make_case(shape, routing, device, dtype)
        want = wanted(case)
        for name, implementation in implementations(layers_only=False).items():
            found = errors(step(implementation, case), want)
            for tensor, error in found.items():
                if not error <= TOLERANCE[dtype]:  # also rejects NaN
                    raise UserError(
                        f"{name} is wrong on {routing} routing in {dtype}: {tensor} is off by {error:.1e} of its "
                        f"largest entry, allowed is {TOLERANCE[dtype]:.0e}; nothing was timed"
                    )
            yield name, routing, max(found.values())


def implementations(layers_only: bool) -> dict[str, Ours]:
    """Return the implementations to compare, by name."""
    named: dict[str, Ours] = {name: Ours(name) for name in OURS}
    named |= {name: Upstream(impl) for name, impl in UPSTREAM.items()}
    return named | ({"dense layer": Dense()} if layers_only else {})


def time_layers(
    device: torch.device, dtype: torch.dtype, tokens: list[int], repeats: int
) -> Iterator[tuple[Shape, str, str, Timing | None]]:
    """Yield (shape, routing, implementation, timing); the timing is None if out of memory."""
    shapes = [Shape(name, N, D, D, 32, 4) for name, D in (("MoE-M", 768), ("MoE-L", 1536)) for N in tokens]
    for shape in [SMALL] if SMOKE else shapes:
        for routing in ("balanced", "skewed"):
            case = make_case(shape, routing, device, dtype)
            for name, implementation in implementations(layers_only=True).items():
                if name == "dense layer" and routing != "balanced":
                    continue
                try:
                    timing = time_layer(implementation, case, device, repeats)
                except torch.OutOfMemoryError:
                    timing = None
                yield shape, routing, name, timing
                print(report.progress(shape, routing, name, timing), file=sys.stderr, flush=True)


def time_steps(
    device: torch.device, dtype: torch.dtype, batch: int, repeats: int
) -> Iterator[tuple[str, str, Step | str]]:
    """Yield (model, backend, step or error) for each backend and the dense model, eager and compiled."""
    shapes = {"MoE-M": smoke_shape() if SMOKE else preset_shape("moe_m", 100_277)}
    if not SMOKE:
        shapes["Dense-M"] = preset_shape("dense_m", 100_277)
    runs = [("MoE-M", name) for name in OURS] + [("Dense-M", "none")] * (not SMOKE)
    for compiled in (False,) if SMOKE else (False, True):
        for model, backend in runs:
            how = f"{backend}, {'compiled' if compiled else 'eager'}"
            try:
                length = 16 if SMOKE else 2048
                found: Step | str = time_step(shapes[model], backend, batch, length, device, dtype, compiled, repeats)
            except Exception as error:  # keep the times of the layers
                if SMOKE:
                    raise
                found = f"did not run: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
            print(f"{model}, {how}: {found}", file=sys.stderr, flush=True)
            yield model, how, found


def main() -> None:
    """Check, time and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="append the section to benchmarks/RESULTS.md")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768], help="tokens per layer call")
    parser.add_argument("--batch", type=int, default=16, help="sequences of 2048 tokens in a training step")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds; medians are reported")
    args = parser.parse_args()
    if not SMOKE and not torch.cuda.is_available():
        raise UserError("no CUDA device is visible: run this on a GPU, or set SMOKE=1 for a dry run on a CPU")
    if SMOKE and args.write:
        raise UserError("--write cannot be used with SMOKE=1, whose numbers are meaningless")
    warnings.filterwarnings("ignore", message="Grouped GEMM not available")
    device = torch.device("cpu" if SMOKE else "cuda")
    dtypes = (torch.float32, torch.float16) if SMOKE else (torch.bfloat16,)
    repeats, timed = (1, torch.float32) if SMOKE else (args.repeats, torch.bfloat16)
    if SMOKE:
        torch.set_num_threads(1)
    checked = {str(dtype): list(check(device, dtype)) for dtype in dtypes}
    print("all implementations are correct; timing", file=sys.stderr, flush=True)
    peak = matmul_peak(device, timed, 256 if SMOKE else 8192, repeats)
    layers, steps = [], []
    try:
        for layer in time_layers(device, timed, args.tokens, repeats):
            layers.append(layer)
        for whole in time_steps(device, timed, 1 if SMOKE else args.batch, repeats):
            steps.append(whole)
    except KeyboardInterrupt:
        print("interrupted: partial results", file=sys.stderr)
    section = report.section(device, checked, peak, layers, steps, SMOKE)
    print(section)
    if args.write:
        with RESULTS.open("a") as file:
            file.write("\n" + section)


if __name__ == "__main__":
    assert set(OURS) < set(BACKENDS)
    with exit_on_user_error():
        main()
