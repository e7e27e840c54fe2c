"""Times of one layer and of the largest matrix product, with device events, for `gpu_check.py`."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.layers import Case, Ours


@dataclass(frozen=True)
class Timing:
    """Medians in milliseconds, the spread of the total, and the peak of additional memory."""

    forward: float
    backward: float
    total: float
    spread: float  # (third quartile - first) / median of the total
    peak_mib: float | None  # None on a CPU


class Clock:
    """Device events on CUDA, the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        """Return a time stamp in the device's order of execution."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, begin: Any, end: Any) -> float:
        """Return the time between two stamps; synchronizes with the device."""
        if self.device.type != "cuda":
            return 1e3 * float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end))


def time_layer(implementation: Ours, case: Case, device: torch.device, repeats: int) -> Timing:
    """Time forward and backward, including the plan, after three warm-up rounds (compilation, autotuning)."""
    clock, leaves = Clock(device), implementation.prepare(case)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]

    def run() -> list[Any]:
        moments = [clock.now()]
        y = implementation.forward(leaves, case)
        moments.append(clock.now())
        torch.autograd.grad(y, wanted, case.dy_ND)
        return [*moments, clock.now()]

    for _ in range(3 if device.type == "cuda" else 0):
        run()
    held = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    rounds = [run() for _ in range(repeats)]
    forward, backward, total = (
        [clock.milliseconds(moments[a], moments[b]) for moments in rounds] for a, b in ((0, 1), (1, 2), (0, 2))
    )
    peak_mib = (torch.cuda.max_memory_allocated() - held) / 2**20 if device.type == "cuda" else None
    low, median, high = statistics.quantiles(total, n=4) if repeats > 1 else total * 3
    spread = (high - low) / median
    return Timing(statistics.median(forward), statistics.median(backward), median, spread, peak_mib)


def matmul_peak(device: torch.device, dtype: torch.dtype, size: int, repeats: int) -> float:
    """Return the TFLOP/s of one large square matrix product of random numbers."""
    clock = Clock(device)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    for _ in range(3):
        a @ b
    times = []
    for _ in range(repeats):
        begin = clock.now()
        a @ b
        times.append(clock.milliseconds(begin, clock.now()))
    return 2 * size**3 / statistics.median(times) / 1e9
