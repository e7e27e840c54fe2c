"""What the analysis `flops` prints: parameters, FLOPs and memory, beside the paper's numbers where it has any."""

from collections.abc import Mapping

from rich.table import Table

from simbal.analysis.paper_models import Printed
from simbal.analysis.training_cost import Parameters
from simbal.console import new_grid
from simbal.model.memory_cost import MemoryCost

UNITS = {"days": 86_400, "hours": 3_600, "minutes": 60, "seconds": 1}  # in seconds


def of_parameters(counted: Parameters, printed: Printed | None) -> Table:
    """A line for each part; table 1 of the paper has three of them."""
    grid = _grid("parameters", ("all", "active", "share of all"), printed)
    parts = {
        "embedding": (counted.embedding, counted.embedding),
        "head": (counted.head, counted.head),
        "attention": (counted.attention, counted.attention),
        "FFN": (counted.ffn, counted.ffn_active),
        "router": (counted.router, counted.router),
        "norms": (counted.norms, counted.norms),
        "total": (counted.total, counted.active),
    }
    for name, (count, active) in parts.items():
        paper = ""
        if printed and name == "embedding":
            paper = _short(printed.embedding)
        if printed and name == "total":
            paper = f"{_short(printed.total)}, active {_short(printed.active)}"
        if name == "total":
            grid.add_section()
        grid.add_row(name, f"{count:,}", f"{active:,}", f"{count / counted.total:.4%}", *([paper] if printed else []))
    grid.add_row("less embedding", "", f"{counted.without_embedding:,}", "", *([""] if printed else []))
    return grid


def of_training(numbers: Mapping[str, float], tokens: int, printed: Printed | None) -> Table:
    """6 N T beside the exact count."""
    grid = _grid("FLOPs", ("ours",), printed)
    rows = {
        "forward, per token": (f"{numbers['forward_flops']:,}", ""),
        "training tokens T": (f"{tokens:,}", printed and f"{printed.tokens:.3g}"),
        "training, exact": (f"{numbers['training_flops']:.4e}", ""),
        "training, 6 N T": (f"{numbers['6NT']:.4e}", printed and f"{printed.flops:.3e}"),
    }
    for name, (ours, paper) in rows.items():
        grid.add_row(name, ours, *([paper or ""] if printed else []))
    return grid


def of_memory(total: int, memory: MemoryCost, micro_batch: int, seq_len: int, precision: str) -> Table:
    """What a training step holds, and how much of it each of the `total` parameters takes."""
    grid = new_grid(f"memory of {micro_batch} x {seq_len} tokens in {precision}")
    for heading in ("", "bytes per parameter", "GiB"):
        grid.add_column(heading, justify="right" if heading else "left")
    for part, size in {
        "weights": memory.weights, "gradients": memory.gradients, "AdamW's two moments": memory.moments
    }.items():  # fmt: skip
        grid.add_row(part, str(size // total), _gib(size))
    grid.add_row("activations", "", _gib(memory.activations))
    grid.add_row("working memory of a layer", "", _gib(memory.working))
    grid.add_section()
    grid.add_row("most at once", "", _gib(memory.peak))
    return grid


def notes(
    counted: Parameters,
    printed: Printed | None,
    tokens: int,
    seconds: float,
    device_flops: float,
    utilisation: float,
) -> list[str]:
    """Time; what the formulas count; where the paper's numbers need another reading."""
    said = [
        f"Training takes {duration(seconds)} on one device of {device_flops:.3g} FLOP/s used to "
        f"{utilisation:.0%}: {tokens / seconds:,.0f} tokens per second.",
        "Exact: forward 2 M + 2 L D (S + 1) per token, with M the active matrices (N less the norms) and causal "
        "attention averaged over positions; training 3 times that. N: active parameters less the input embedding.",
        "Memory: activations are counted as autograd keeps them on a CPU, to 3% of what was measured there; "
        "on a GPU nothing has been measured yet.",
    ]
    if counted.router:
        said.append(f"A pass through every expert takes {counted.every_expert:.2f} times the parameters N.")
    if printed:
        said.append("Paper: arXiv 2506.14038, table 1; its 6 N T is of its rounded N and T.")
        if _short(counted.total) != _short(printed.total):
            said.append(
                f"The paper's total is that of biases on the experts, {counted.total_with_biases(attention=False):,}, "
                f"or on experts and attention, {counted.total_with_biases(attention=True):,}; here no layer has any."
            )
    return said


def _grid(title: str, headings: tuple[str, ...], printed: Printed | None) -> Table:
    grid = new_grid(title)
    grid.add_column("")
    for heading in (*headings, *(["paper"] if printed else [])):
        grid.add_column(heading, justify="right")
    return grid


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def duration(seconds: float) -> str:
    """In the largest unit of which there are two."""
    unit = next((unit for unit, size in UNITS.items() if seconds >= 2 * size), "seconds")
    return f"{seconds / UNITS[unit]:,.1f} {unit}"


def _short(count: int) -> str:
    """In the paper's digits: 627M, 3.14B."""
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
