"""What a model of conf/model costs: parameters, FLOPs, memory and time; no weights are made.

Reference: arXiv 2506.14038, table 1 and the FLOPs of its text.
"""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from simbal.analysis import flops_tables
from simbal.analysis.finding import Finding
from simbal.analysis.paper_models import PAPER, VOCABULARY, Printed
from simbal.analysis.training_cost import Parameters, parameters
from simbal.checks import one_of, whole_number
from simbal.errors import UserError
from simbal.model.memory_cost import PRECISIONS, MemoryCost, Step, memory_cost
from simbal.model.transformer import TransformerShape

PRESETS = Path(__file__).parents[3] / "conf" / "model"
DEFINITION = {
    "active": "parameters that one token passes through: K of the E experts, and all else",
    "6NT": "6 N T, N: active parameters less the input embedding, T: training tokens",
    "forward": "FLOPs per token: 2 M + 2 L D (S + 1), M: active parameters less embedding and norms; causal attention "
    "averaged over positions",
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
    precision: str,
    device_flops: float,
    utilisation: float,
) -> Finding:
    """Count the parameters of a preset, and what training it takes.

    Args:
        preset: the name of a file of conf/model.
        vocab_size: the paper's is 100277.
        seq_len: tokens.
        steps: of training; None: the paper's, for its four models.
        batch_tokens: per step.
        micro_batch: sequences that memory is counted for.
        precision: 32-true, bf16-mixed or bf16-true; memory depends on it.
        device_flops: peak FLOP/s of a device.
        utilisation: share of the peak that training reaches.

    Raises:
        UserError: there is no such preset, or a key is out of its range.
    """
    counted = parameters(preset_shape(preset, vocab_size))
    steps = _steps(preset, steps)
    _check_keys(seq_len, batch_tokens, micro_batch, device_flops, utilisation)
    one_of("analysis.flops.precision", precision, PRECISIONS)
    accumulates = micro_batch * seq_len < batch_tokens
    memory = memory_cost(counted.shape, Step(micro_batch, seq_len, accumulates, precision, device="cuda"))
    tokens = steps * batch_tokens
    seconds = counted.training_flops(seq_len, tokens) / (device_flops * utilisation)
    numbers = _numbers(counted, memory, seq_len, tokens) | {"seconds": seconds}
    printed = PAPER.get(preset) if vocab_size == VOCABULARY else None
    record = {"definition": DEFINITION, "preset": preset, "steps": steps, "tokens": tokens, "metrics": numbers}
    tables = [
        flops_tables.of_parameters(counted, printed),
        flops_tables.of_training(numbers, tokens, printed),
        flops_tables.of_memory(counted.total, memory, micro_batch, seq_len, precision),
    ]
    notes = flops_tables.notes(counted, printed, tokens, seconds, device_flops, utilisation)
    memory_record = {"micro_batch": micro_batch, "precision": precision} | asdict(memory)
    return Finding(tables, notes, record | {"memory": memory_record} | _details(counted, printed))


def _details(counted: Parameters, printed: Printed | None) -> dict[str, Any]:
    """What stands beside the metrics: the readings with biases, and the paper's numbers."""
    details: dict[str, Any] = {
        "with_biases": {
            "experts": counted.total_with_biases(attention=False),
            "experts and attention": counted.total_with_biases(attention=True),
        },
    }
    if printed:
        details["paper"] = {"source": "arXiv 2506.14038, table 1"} | printed._asdict() | {"product": printed.product}
    return details


def _check_keys(seq_len: int, batch_tokens: int, micro_batch: int, device_flops: float, utilisation: float) -> None:
    for key, value in {"seq_len": seq_len, "batch_tokens": batch_tokens, "micro_batch": micro_batch}.items():
        whole_number(f"analysis.flops.{key}", value, 1)
    if not (_is_number(device_flops) and device_flops > 0):
        raise UserError(f"analysis.flops.device_flops={device_flops} must be a number above 0")
    if not (_is_number(utilisation) and 0 < utilisation <= 1):
        raise UserError(f"analysis.flops.utilisation={utilisation} must be above 0 and at most 1")


def preset_shape(preset: str, vocab_size: int) -> TransformerShape:
    """The shape in conf/model/<preset>.yaml; `UserError` if there is none, or the vocabulary is none."""
    names = sorted(file.stem for file in PRESETS.glob("*.yaml"))
    one_of("analysis.flops.preset", preset, names)
    whole_number("analysis.flops.vocab_size", vocab_size, 1)
    numbers = yaml.safe_load((PRESETS / f"{preset}.yaml").read_text(encoding="utf-8"))
    del numbers["init_std"]
    return TransformerShape(vocab_size=vocab_size, gating="softmax", renormalize=True, **numbers)


def _steps(preset: str, steps: int | None) -> int:
    if steps is None:
        if preset not in PAPER:
            raise UserError(f"analysis.flops.steps=null: {preset} is no model of the paper, so give the steps")
        return PAPER[preset].steps
    whole_number("analysis.flops.steps", steps, 1)
    return steps


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _numbers(counted: Parameters, memory: MemoryCost, seq_len: int, tokens: int) -> dict[str, int | float]:
    parts = ("total", "active", "embedding", "head", "attention", "ffn", "ffn_active", "router", "norms")
    return {name: getattr(counted, name) for name in parts} | {
        "without_embedding": counted.without_embedding,
        "matrices": counted.matrices,
        "forward_flops": counted.forward_flops(seq_len),
        "training_flops": counted.training_flops(seq_len, tokens),
        "6NT": counted.estimated_flops(tokens),
        "every_expert": counted.every_expert,
        "memory_bytes": memory.weights + memory.gradients + memory.moments,
        "activation_bytes": memory.activations,
        "peak_bytes": memory.peak,
    }
