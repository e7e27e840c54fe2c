"""The table of `bench_step.py` and the processor's peak performance."""

import platform
import statistics
import time
from pathlib import Path

import torch

from benchmarks.step_turns import Seconds


def peak() -> float:
    """Return the FLOP/s, by CPU time, of torch's fastest fp32 matrix product on this machine, the best of several."""
    a, b, best = torch.randn(1024, 1024), torch.randn(1024, 1024), 0.0
    linear = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None
    products = [lambda: a @ b] + ([lambda: linear(a, b, None, "none", [], "")] if linear else [])
    for product in products:
        for _ in range(10):
            started = time.process_time()
            product()
            best = max(best, 2 * 1024**3 / (time.process_time() - started))
    return best


def cpu_model() -> str:
    """Return the name of this machine's processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def report(taken: dict[str, list[Seconds]], flops: int, tokens: int) -> None:
    """Print a line per arm: time, speed, and time relative to the first arm."""
    fastest = peak()
    print(f"peak {fastest / 1e9:.0f} GFLOP/s per core, step {flops / 1e9:.2f} GFLOP, {tokens} tokens")
    first = next(iter(taken.values()))
    for name, times in taken.items():
        cpu, wall = (statistics.median(column) for column in zip(*times, strict=True))
        ratios = [statistics.median(t[i] / ours[i] for t, ours in zip(times, first, strict=True)) for i in (0, 1)]
        print(
            f"{name:14} {1e3 * cpu:7.1f} ms CPU  {1e3 * wall:7.1f} ms wall  {tokens / cpu:7.0f} tokens/CPU s  "
            f"{tokens / wall:7.0f} tokens/s  x{ratios[0]:.2f} CPU  x{ratios[1]:.2f} wall  "
            f"{flops / cpu / fastest:.0%} of peak"
        )
