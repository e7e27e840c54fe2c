"""The analysis `flops`: parameters and FLOPs of a model in conf/model, counted without building it.

Reference: arXiv 2506.14038, table 1 and the FLOPs in its text.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import PositiveInt
from rich.table import Table

from simbal.analysis.result import Result
from simbal.config.options import option_keys, options
from simbal.config.schema import CL100K_IDS
from simbal.config.values import check_choice
from simbal.console import new_grid
from simbal.cost import Parameters, parameters
from simbal.errors import UserError
from simbal.model.transformer import TransformerShape

DEFINITION = {
    "active": "parameters used per token: K of the E experts, and everything else",
    "6NT": "6 N T, where N is the active parameters without the input embedding (unless it is tied to the head), and T "
    "the training tokens",
    "forward": "FLOPs per token: 2 M + 2 L H P (S + 1), where M is the active parameters without embedding and norms, "
    "and H P the width of all heads (D in the paper's models); causal attention averaged over positions",
    "training": "3 times forward, times the training tokens",
}
NUMBERS = (
    "total", "active", "embedding", "head", "attention", "ffn", "ffn_active", "router", "norms", "without_embedding",
    "matrices", "every_expert",
)  # fmt: skip


class Printed(NamedTuple):
    """The paper's numbers for one model: table 1, and the tokens and 6 N T given in the text."""

    embedding: int
    active: int
    total: int
    tokens: int  # training tokens, rounded as in the text
    flops: float
    steps: int  # training steps of 2^20 tokens, inferred from 19.9B and 78.6B tokens


_M, _B = 10**6, 10**9
PAPER = {
    "dense_m": Printed(77 * _M, 230 * _M, 230 * _M, 20 * _B, 1.836e19, 19_000),
    "moe_m": Printed(77 * _M, 230 * _M, 627 * _M, 20 * _B, 1.836e19, 19_000),
    "dense_l": Printed(154 * _M, 761 * _M, 761 * _M, 78 * _B, 2.840e20, 75_000),
    "moe_l": Printed(154 * _M, 761 * _M, 3140 * _M, 78 * _B, 2.840e20, 75_000),
}
PAPER["moe_m_bias"] = PAPER["moe_m"]


def flops(
    preset: str, vocab_size: PositiveInt, seq_len: PositiveInt, steps: PositiveInt | None, batch_tokens: PositiveInt
) -> Result:
    """Count the parameters of a preset, and the FLOPs of training it.

    Args:
        preset: name of a file in conf/model.
        vocab_size: number of token ids; 100277 in the paper.
        seq_len: tokens per sequence.
        steps: training steps; None: the paper's, for its four models.
        batch_tokens: tokens per step.

    Raises:
        UserError: the preset does not exist, or steps is missing.
    """
    counted = parameters(preset_shape(preset, vocab_size))
    if steps is None:
        if preset not in PAPER:
            raise UserError(f"analysis.flops.steps=null needs a model of the paper (got {preset}): set the steps")
        steps = PAPER[preset].steps
    tokens = steps * batch_tokens
    numbers = {name: getattr(counted, name) for name in NUMBERS} | {
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
    return Result([_parameters_table(counted, printed), training], _notes(counted, printed), record)


def preset_shape(preset: str, vocab_size: int) -> TransformerShape:
    """Return the shape of a model in conf/model; `UserError` if it does not exist."""
    check_choice("analysis.flops.preset", preset, [*options("model")])
    return shape_of(read_option("model", preset), vocab_size)


def shape_of(model: dict[str, Any], vocab_size: int) -> TransformerShape:
    """Return the shape of a model with these keys of conf/model. Cost does not depend on the gating."""
    numbers = {key: value for key, value in model.items() if key not in ("init_std", "kernels")}
    return TransformerShape(vocab_size=vocab_size, gating="softmax", renormalize=True, **numbers)


def read_option(group: str, option: str) -> dict[str, Any]:
    """Return the keys of an option, including inherited ones."""
    return {key.removeprefix(f"{group}."): value for key, value in option_keys(group, option).items()}


def _parameters_table(counted: Parameters, printed: Printed | None) -> Table:
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
    paper = {}
    if printed:
        total = f"{_abbreviate(printed.total)}, active {_abbreviate(printed.active)}"
        paper = {"embedding": [_abbreviate(printed.embedding)], "total": [total]}
    for name, (count, active) in parts.items():
        cells = (name, f"{count:,}", f"{active:,}", f"{count / counted.total:.4%}", *paper.get(name, []))
        grid.add_row(*cells, end_section=name == "norms")
    grid.add_row("N" if counted.shape.tie_embeddings else "without embedding", "", f"{counted.without_embedding:,}")
    return grid


def _notes(counted: Parameters, printed: Printed | None) -> list[str]:
    tied = ", which is tied to the head and therefore included" if counted.shape.tie_embeddings else ""
    notes = [
        "Exact: forward 2 M + 2 L H P (S + 1) per token, where M is N without the norms, H heads have width P and "
        "causal attention is averaged over positions; training is 3 times forward. N: active parameters without the "
        f"input embedding{tied}."
    ]
    if counted.router:
        notes.append(f"A pass through all experts uses {counted.every_expert:.2f} times as many parameters as N.")
    if printed:
        notes.append("Paper: arXiv 2506.14038, table 1. Its 6 N T uses rounded N and T.")
        if _abbreviate(counted.total) != _abbreviate(printed.total):
            biased = parameters(replace(counted.shape, bias=True)).total
            notes.append(f"The paper's total includes biases: model.bias=true has {biased:,} parameters.")
    return notes


def _abbreviate(count: int) -> str:
    """Return a number with the paper's digits, such as 627M or 3.14B."""
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
