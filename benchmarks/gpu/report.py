"""The Markdown section that `gpu_check.py` prints."""

import importlib.metadata
import platform
from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from benchmarks.gpu.layers import Shape
from benchmarks.gpu.megablocks_ops import install
from benchmarks.gpu.timing import Timing
from benchmarks.gpu.training import Step
from benchmarks.gpu.upstream import GROUPED_GEMM

Checked = dict[str, list[tuple[str, str, float]]]
Layers = Sequence[tuple[Shape, str, str, Timing | None]]
Steps = Sequence[tuple[str, str, Step | str]]


def progress(shape: Shape, routing: str, name: str, timing: Timing | None) -> str:
    """Return one line to print while it runs."""
    return f"{shape.name} {shape.N} {routing} {name}: {'out of memory' if timing is None else f'{timing.total:.3f} ms'}"


def section(device: torch.device, checked: Checked, peak: float, layers: Layers, steps: Steps, smoke: bool) -> str:
    """Return the full section for RESULTS.md."""
    where = "CPU, Triton interpreter" if smoke else torch.cuda.get_device_name(device)
    warning = "A dry run (SMOKE=1): the numbers are meaningless.\n\n" if smoke else ""
    return (
        f"## Expert layers on {where}, {datetime.now(UTC):%Y-%m-%d}\n\n{warning}"
        f"`make gpu-check`; {versions()}. Largest matrix product measured here: {peak:.0f} TFLOP/s.\n\n"
        f"{correctness(checked)}\n{layer_table(layers, peak)}\n{winners(layers)}\n{step_table(steps, peak)}"
    )


def versions() -> str:
    """Return the versions of all libraries that compute."""
    names = ("torch", "triton", "megablocks", "stanford-stk")
    shown = [f"{name} {importlib.metadata.version(name)}" for name in names]
    cuda = [f"CUDA {torch.version.cuda}"] if torch.version.cuda else []
    ops = [f"megablocks_ops {install()}", f"grouped_gemm {GROUPED_GEMM}"]
    return ", ".join([f"Python {platform.python_version()}", *shown, *cuda, *ops])


def correctness(checked: Checked) -> str:
    """Return the largest error of y, dx, dp, dw13, dw2 relative to the largest entry of the fp32 reference."""
    dtypes = list(checked)
    rows: dict[tuple[str, str], list[float]] = {}
    for found in checked.values():
        for name, routing, error in found:
            rows.setdefault((name, routing), []).append(error)
    lines = [f"| {name} | {routing} | {' | '.join(f'{e:.1e}' for e in es)} |" for (name, routing), es in rows.items()]
    head = (
        f"| largest error against fp32 `reference` | routing | {' | '.join(dtypes)} |\n|---|---|{'---:|' * len(dtypes)}"
    )
    return "\n".join([head, *lines]) + "\n"


def layer_table(layers: Layers, peak: float) -> str:
    """Times, rates and memory of every layer; ratio: time of MegaBlocks' faster module divided by this time."""
    head = (
        "| layer | tokens | routing | implementation | forward ms | backward ms | total ms | spread | TFLOP/s | "
        "of peak | to MegaBlocks' module | peak MiB |\n|---|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    return "\n".join([head, *(layer_row(row, best_upstream(layers, row), peak) for row in layers)]) + "\n"


def best_upstream(layers: Layers, row: tuple[Shape, str, str, Timing | None]) -> float | None:
    """Milliseconds of MegaBlocks' faster module in the same case."""
    times = [t.total for shape, routing, name, t in layers if t and "module" in name and (shape, routing) == row[:2]]
    return min(times, default=None)


def layer_row(row: tuple[Shape, str, str, Timing | None], upstream: float | None, peak: float) -> str:
    """One line."""
    shape, routing, name, timing = row
    start = f"| {shape.name} | {shape.N} | {routing} | {name} |"
    if timing is None:
        return f"{start} out of memory |" + " |" * 7
    tflops = 3 * shape.flops / timing.total / 1e9
    ratio = "" if upstream is None else f"{upstream / timing.total:.2f}x"
    memory = "" if timing.peak_mib is None else f"{timing.peak_mib:.0f}"
    return (
        f"{start} {timing.forward:.3f} | {timing.backward:.3f} | {timing.total:.3f} | {timing.spread:.1%} | "
        f"{tflops:.1f} | {tflops / peak:.1%} | {ratio} | {memory} |"
    )


def winners(layers: Layers) -> str:
    """Return rows for src/simbal/experts/select.py: for each width, the backend with the smallest total time."""
    totals: dict[tuple[int, int], dict[str, float]] = {}
    for shape, _, name, timing in layers:
        if "module" not in name and name != "dense layer":
            of_width = totals.setdefault((shape.D, shape.F), {})
            of_width[name] = of_width.get(name, 0.0) + (timing.total if timing else float("inf"))
    lines = []
    for (D, width), by_name in totals.items():
        best = min(by_name, key=lambda name: by_name[name])
        shown = ", ".join(f"{name} {ms:.2f}" for name, ms in by_name.items())
        lines.append(f"- D {D}, F {width}: {best} (ms over all cases: {shown})")
    return "\n".join(["Fastest of the backends, for `src/simbal/experts/select.py`:\n", *lines]) + "\n"


def step_table(steps: Steps, peak: float) -> str:
    """Full training steps; MFU: the model's training FLOP/s divided by the measured matrix-product peak."""
    head = "| training step | backend | ms | tokens/s | TFLOP/s | MFU | peak GiB |\n|---|---|---:|---:|---:|---:|---:|"
    return "\n".join([head, *(step_row(model, how, found, peak) for model, how, found in steps)]) + "\n"


def step_row(model: str, how: str, found: Step | str, peak: float) -> str:
    """One line."""
    if isinstance(found, str):
        return f"| {model} | {how} | {found} |" + " |" * 4
    memory = "" if found.peak_gib is None else f"{found.peak_gib:.1f}"
    return (
        f"| {model} | {how} | {found.milliseconds:.1f} | {found.tokens_per_second:.0f} | {found.tflops:.1f} | "
        f"{found.tflops / peak:.1%} | {memory} |"
    )
