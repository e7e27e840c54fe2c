"""The analysis `flops`: the parameters and FLOPs of a model of conf/model; no weights are made.

Reference: arXiv 2506.14038, table 1 and the FLOPs of its text.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from rich.table import Table

from simbal.analysis.result import Result
from simbal.config.options import option_keys, options
from simbal.config.schema import CL100K_IDS
from simbal.config.values import one_of, whole_number
from simbal.console import new_grid
from simbal.cost.parameters import Parameters, parameters
from simbal.errors import UserError
from simbal.model.transformer import TransformerShape

DEFINITION = {
    "active": "parameters that one token passes through: K of the E experts, and all else",
    "6NT": "6 N T, N: active parameters less the input embedding (but a tied one is also the head), T: training tokens",
    "forward": "FLOPs per token: 2 M + 2 L H P (S + 1), M: active parameters less embedding and norms, H P: width of "
    "all heads, in the paper's models D; causal attention averaged over positions",
    "training": "3 times forward, times the training tokens",
}


class Printed(NamedTuple):
    """A row of table 1 as printed, in parameters; then the tokens and the 6 N T of the text."""

    embedding: int
    active: int
    total: int
    tokens: int  # of training, as rounded in the text
    flops: float  # as printed
    steps: int  # of 2^20 tokens; inferred from 19.9B and 78.6B tokens


_M, _B = 10**6, 10**9
PAPER = {
    "dense_m": Printed(77 * _M, 230 * _M, 230 * _M, 20 * _B, 1.836e19, 19_000),
    "moe_m": Printed(77 * _M, 230 * _M, 627 * _M, 20 * _B, 1.836e19, 19_000),
    "dense_l": Printed(154 * _M, 761 * _M, 761 * _M, 78 * _B, 2.840e20, 75_000),
    "moe_l": Printed(154 * _M, 761 * _M, 3140 * _M, 78 * _B, 2.840e20, 75_000),
}


def flops(preset: str, vocab_size: int, seq_len: int, steps: int | None, batch_tokens: int) -> Result:
    """Count the parameters of a preset, and the FLOPs of training it.

    Args:
        preset: the name of a file of conf/model.
        vocab_size: token ids; the paper's is 100277.
        seq_len: tokens of a sequence.
        steps: of training; None: the paper's, for its four models.
        batch_tokens: tokens per step.

    Raises:
        UserError: there is no such preset, or a key is out of its range.
    """
    counted = parameters(preset_shape(preset, vocab_size))
    if steps is None:
        if preset not in PAPER:
            raise UserError(f"analysis.flops.steps=null: {preset} is no model of the paper, so give the steps")
        steps = PAPER[preset].steps
    for key, value in {"seq_len": seq_len, "steps": steps, "batch_tokens": batch_tokens}.items():
        whole_number(f"analysis.flops.{key}", value, 1)
    tokens = steps * batch_tokens
    names = (
        "total", "active", "embedding", "head", "attention", "ffn", "ffn_active", "router", "norms",
        "without_embedding", "matrices", "every_expert",
    )  # fmt: skip
    numbers = {name: getattr(counted, name) for name in names} | {
        "forward_flops": counted.forward_flops(seq_len),
        "training_flops": counted.training_flops(seq_len, tokens),
        "6NT": counted.estimated_flops(tokens),
    }
    record = {"definition": DEFINITION, "preset": preset, "steps": steps, "tokens": tokens, "metrics": numbers}
    printed = PAPER.get(preset) if vocab_size == CL100K_IDS else None
    if printed:
        record["paper"] = {"source": "arXiv 2506.14038, table 1"} | printed._asdict()
    training = new_grid("FLOPs", "", "ours", *(["paper"] if printed else []))
    training.add_row("forward, per token", f"{numbers['forward_flops']:,}")
    training.add_row("training tokens T", f"{tokens:,}", *([f"{printed.tokens:.3g}"] if printed else []))
    training.add_row("training, exact", f"{numbers['training_flops']:.4e}")
    training.add_row("training, 6 N T", f"{numbers['6NT']:.4e}", *([f"{printed.flops:.3e}"] if printed else []))
    return Result([_of_parameters(counted, printed), training], _notes(counted, printed), record)


def preset_shape(preset: str, vocab_size: int) -> TransformerShape:
    """Return the shape in conf/model/<preset>.yaml; `UserError` if there is none, or the vocabulary is none."""
    one_of("analysis.flops.preset", preset, [*options("model")])
    whole_number("analysis.flops.vocab_size", vocab_size, 1)
    return shape_of(read_option("model", preset), vocab_size)


def shape_of(model: dict[str, Any], vocab_size: int) -> TransformerShape:
    """Return the shape of a model with these keys of conf/model; how its router weighs experts costs nothing."""
    numbers = {key: value for key, value in model.items() if key != "init_std"}
    return TransformerShape(vocab_size=vocab_size, gating="softmax", renormalize=True, **numbers)


def read_option(group: str, option: str) -> dict[str, Any]:
    """Return the keys of an option, with those that it inherits."""
    return {key.removeprefix(f"{group}."): value for key, value in option_keys(group, option).items()}


def _of_parameters(counted: Parameters, printed: Printed | None) -> Table:
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


def _notes(counted: Parameters, printed: Printed | None) -> list[str]:
    """Return notes on what the formulas count, and on where the paper's numbers read differently."""
    notes = [
        "Exact: forward 2 M + 2 L H P (S + 1) per token, with M the active matrices (N less the norms), H heads of "
        "width P and causal attention averaged over positions; training 3 times that. N: active parameters less the "
        "input embedding" + (", which here is the head too and stays." if counted.shape.tie_embeddings else "."),
    ]
    if counted.router:
        notes.append(f"A pass through every expert takes {counted.every_expert:.2f} times the parameters N.")
    if printed:
        notes.append("Paper: arXiv 2506.14038, table 1; its 6 N T is of its rounded N and T.")
        if _short(counted.total) != _short(printed.total):
            biased = parameters(replace(counted.shape, bias=True)).total
            notes.append(f"The paper's total has biases on the experts: model.bias=true makes {biased:,} parameters.")
    return notes


def _short(count: int) -> str:
    """Return a number in the paper's digits: 627M, 3.14B."""
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
