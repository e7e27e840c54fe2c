"""The analysis `flops`: parameters, FLOPs, memory and time of a model of conf/model; no weights are made.

Reference: arXiv 2506.14038, table 1 and the FLOPs of its text.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict

from rich.table import Table

from simbal.analysis.shared.finding import Finding
from simbal.config.options import options
from simbal.config.schema import CL100K_IDS
from simbal.config.values import one_of, whole_number
from simbal.cost.memory import DeviceMemory, Precision, Step, memory_cost
from simbal.cost.parameters import Parameters, parameters
from simbal.cost.recipe import MOST, PAPER, Printed, read_option, shape_of
from simbal.errors import UserError
from simbal.files.console import new_grid
from simbal.model.transformer import TransformerShape

UNITS = {"days": 86_400, "hours": 3_600, "minutes": 60, "seconds": 1}  # in seconds
DEFINITION = {
    "active": "parameters that one token passes through: K of the E experts, and all else",
    "6NT": "6 N T, N: active parameters less the input embedding (but a tied one is also the head), T: training tokens",
    "forward": "FLOPs per token: 2 M + 2 L H P (S + 1), M: active parameters less embedding and norms, H P: width of "
    "all heads, in the paper's models D; causal attention averaged over positions",
    "training": "3 times forward, times the training tokens",
    "memory": "bytes of weights, gradients and two AdamW moments; activations: what autograd keeps of one micro-batch "
    "with experts=torch, counted as measured on a CPU; working: the most that one layer or the head needs beside it; "
    "peak: all of it together, less the smaller of gradients and activations if no micro-batches are accumulated",
    "seconds": "training FLOPs / (device_flops * utilisation), on one device",
}


def flops(
    preset: str,
    vocab_size: int,
    seq_len: int,
    steps: int | None,
    batch_tokens: int,
    micro_batch: int,
    precision: Precision,
    device_flops: float,
    utilisation: float,
) -> Finding:
    """Count the parameters of a preset, and what training it takes.

    Args:
        preset: the name of a file of conf/model.
        vocab_size: token ids; the paper's is 100277.
        seq_len: tokens of a sequence.
        steps: of training; None: the paper's, for its four models.
        batch_tokens: tokens per step.
        micro_batch: sequences that memory is counted for.
        precision: of the training; memory depends on it.
        device_flops: peak FLOP/s of a device.
        utilisation: share of the peak that training reaches.

    Raises:
        UserError: there is no such preset, or a key is out of its range.
    """
    counted = parameters(preset_shape(preset, vocab_size))
    steps = _steps(preset, steps)
    _check_keys(seq_len, batch_tokens, micro_batch, device_flops, utilisation)
    accumulates = micro_batch * seq_len < batch_tokens
    memory = memory_cost(counted.shape, Step(micro_batch, seq_len, accumulates, precision, device="cuda"))
    tokens = steps * batch_tokens
    seconds = counted.training_flops(seq_len, tokens) / (device_flops * utilisation)
    numbers = _numbers(counted, memory, seq_len, tokens) | {"seconds": seconds}
    printed = PAPER.get(preset) if vocab_size == CL100K_IDS else None
    record = {
        "definition": DEFINITION,
        "preset": preset,
        "steps": steps,
        "tokens": tokens,
        "metrics": numbers,
        "memory": {"micro_batch": micro_batch, "precision": precision} | asdict(memory),
        "with_biases": {
            "experts": counted.total_with_biases(attention=False),
            "experts and attention": counted.total_with_biases(attention=True),
        },
    }
    if printed:
        record["paper"] = {"source": "arXiv 2506.14038, table 1"} | printed._asdict() | {"product": printed.product}
    tables = [
        of_parameters(counted, printed),
        of_training(numbers, tokens, printed),
        of_memory(counted.total, memory, micro_batch, seq_len, precision),
    ]
    return Finding(tables, flops_notes(counted, printed, tokens, seconds, device_flops, utilisation), record)


def preset_shape(preset: str, vocab_size: int) -> TransformerShape:
    """Return the shape in conf/model/<preset>.yaml; `UserError` if there is none, or the vocabulary is none."""
    one_of("analysis.flops.preset", preset, [*options("model")])
    whole_number("analysis.flops.vocab_size", vocab_size, 1, MOST)
    return shape_of(read_option("model", preset), vocab_size)


def of_parameters(counted: Parameters, printed: Printed | None) -> Table:
    """Return the table of parameters, a line for each part; table 1 of the paper has three of them."""
    grid = new_grid("parameters", "", "all", "active", "share of all", *(["paper"] if printed else []))
    parts = {
        "embedding": (counted.embedding, counted.embedding),
        "head": (counted.head, counted.head),
        "attention": (counted.attention, counted.attention),
        "FFN": (counted.ffn, counted.ffn_active),
        "router": (counted.router, counted.router),
        "norms": (counted.norms, counted.norms),
        **({"biases": (counted.bias, counted.bias_active)} if counted.bias else {}),
        "total": (counted.total, counted.active),
    }
    paper = {
        "embedding": [_short(printed.embedding)],
        "total": [f"{_short(printed.total)}, active {_short(printed.active)}"],
    } if printed else {}  # fmt: skip
    for name, (count, active) in parts.items():
        cells = (name, f"{count:,}", f"{active:,}", f"{count / counted.total:.4%}", *paper.get(name, []))
        grid.add_row(*cells, end_section=name == "norms")
    grid.add_row("N" if counted.shape.tie_embeddings else "less embedding", "", f"{counted.without_embedding:,}")
    return grid


def of_training(numbers: Mapping[str, float], tokens: int, printed: Printed | None) -> Table:
    """Return the table of FLOPs, with 6 N T beside the exact count."""
    grid = new_grid("FLOPs", "", "ours", *(["paper"] if printed else []))
    grid.add_row("forward, per token", f"{numbers['forward_flops']:,}")
    grid.add_row("training tokens T", f"{tokens:,}", *([f"{printed.tokens:.3g}"] if printed else []))
    grid.add_row("training, exact", f"{numbers['training_flops']:.4e}")
    grid.add_row("training, 6 N T", f"{numbers['6NT']:.4e}", *([f"{printed.flops:.3e}"] if printed else []))
    return grid


def of_memory(total: int, memory: DeviceMemory, micro_batch: int, seq_len: int, precision: str) -> Table:
    """Return the table of a training step's memory, in all and for each of the `total` parameters."""
    grid = new_grid(f"memory of {micro_batch} x {seq_len} tokens in {precision}", "", "bytes per parameter", "GiB")
    for part, size in {
        "weights": memory.weights, "gradients": memory.gradients, "AdamW's two moments": memory.moments
    }.items():  # fmt: skip
        grid.add_row(part, str(size // total), _gib(size))
    grid.add_row("activations", "", _gib(memory.activations))
    grid.add_row("working memory of a layer", "", _gib(memory.working), end_section=True)
    grid.add_row("most at once", "", _gib(memory.peak))
    return grid


def flops_notes(
    counted: Parameters,
    printed: Printed | None,
    tokens: int,
    seconds: float,
    device_flops: float,
    utilisation: float,
) -> list[str]:
    """Return notes on the time, on what the formulas count, and on where the paper's numbers read differently."""
    said = [
        f"Training takes {duration(seconds)} on one device of {device_flops:.3g} FLOP/s used to "
        f"{utilisation:.0%}: {tokens / seconds:,.0f} tokens per second.",
        "Exact: forward 2 M + 2 L H P (S + 1) per token, with M the active matrices (N less the norms), H heads of "
        "width P and causal attention averaged over positions; training 3 times that. N: active parameters less the "
        "input embedding" + (", which here is the head too and stays." if counted.shape.tie_embeddings else "."),
        "Memory: activations are counted as autograd keeps them on a CPU, to 3% of what was measured there; "
        "a step of MoE-M on an H200 took 12.8 GiB where 15.5 are counted.",
    ]
    if counted.router:
        said.append(f"A pass through every expert takes {counted.every_expert:.2f} times the parameters N.")
    if printed:
        said.append("Paper: arXiv 2506.14038, table 1; its 6 N T is of its rounded N and T.")
        if _short(counted.total) != _short(printed.total):
            said.append(
                f"The paper's total is that of biases on the experts, {counted.total_with_biases(attention=False):,}, "
                f"or on experts and attention, {counted.total_with_biases(attention=True):,}; the former is "
                "what model.bias=true makes."
            )
    return said


def duration(seconds: float) -> str:
    """Return a time in the largest unit of which it has at least two."""
    unit = next((unit for unit, size in UNITS.items() if seconds >= 2 * size), "seconds")
    return f"{seconds / UNITS[unit]:,.1f} {unit}"


def _check_keys(seq_len: int, batch_tokens: int, micro_batch: int, device_flops: float, utilisation: float) -> None:
    for key, value in {"seq_len": seq_len, "batch_tokens": batch_tokens, "micro_batch": micro_batch}.items():
        whole_number(f"analysis.flops.{key}", value, 1, MOST)
    if not 0 < device_flops < math.inf:
        raise UserError(f"analysis.flops.device_flops={device_flops} must be a number above 0")
    if not 0 < utilisation <= 1:
        raise UserError(f"analysis.flops.utilisation={utilisation} must be above 0 and at most 1")
    if device_flops * utilisation < 1:
        raise UserError("analysis.flops.device_flops * analysis.flops.utilisation must be at least 1")


def _steps(preset: str, steps: int | None) -> int:
    if steps is None and preset not in PAPER:
        raise UserError(f"analysis.flops.steps=null: {preset} is no model of the paper, so give the steps")
    return PAPER[preset].steps if steps is None else whole_number("analysis.flops.steps", steps, 1, MOST)


def _numbers(counted: Parameters, memory: DeviceMemory, seq_len: int, tokens: int) -> dict[str, int | float]:
    names = (
        "total", "active", "embedding", "head", "attention", "ffn", "ffn_active", "router", "norms",
        "without_embedding", "matrices", "every_expert",
    )  # fmt: skip
    return {name: getattr(counted, name) for name in names} | {
        "forward_flops": counted.forward_flops(seq_len),
        "training_flops": counted.training_flops(seq_len, tokens),
        "6NT": counted.estimated_flops(tokens),
        "memory_bytes": memory.weights + memory.gradients + memory.moments,
        "activation_bytes": memory.activations,
        "peak_bytes": memory.peak,
    }


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def _short(count: int) -> str:
    """Return a number in the paper's digits: 627M, 3.14B."""
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
