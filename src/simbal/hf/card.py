"""The model card, README.md in an export's folder: what a run's record says of the model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simbal.cost import count_parameters
from simbal.hf.convert import architecture
from simbal.model.transformer import Transformer
from simbal.runs.spec import RunSpec, result_keys

FRONT = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- simbal
---
"""
ROUTER = (
    "transformers computes the router in the precision of the model, training did so in fp32: in bf16 it can choose "
    "other experts, in float32 its logits agree with those of simbal to rounding."
)
QK_NORMS = {"none": "", "head": " with a norm of each", "projection": " with a norm of all"}


def model_card(path: Path, spec: RunSpec, record: dict[str, Any], model: Transformer, tokenizer: str) -> str:
    """Return the card of a finished run in Markdown; `tokenizer` is a sentence on the export's tokenizer."""
    sections = {
        "Model": _model(spec, model),
        "Tokenizer": [tokenizer],
        "Training": _training(spec, record),
        "Balancing": _balancing(record.get("objective") or {}),
        "Metrics at the end of training": _metrics(record),
        "Code": _code(record),
    }
    parts = [f"{FRONT}\n# {code(path.resolve().name)}"]
    parts += [f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines) for title, lines in sections.items()]
    keys = [f"{key}={json.dumps(value)}" for key, value in sorted(result_keys(spec.written).items())]
    return "\n\n".join([*parts, "## Config\n\n```\n" + "\n".join(keys) + "\n```"]) + "\n"


def code(value: object) -> str:
    """Return a code span on one line."""
    return f"`{' '.join(str(value).split())}`"


def _model(spec: RunSpec, model: Transformer) -> Iterator[str]:
    shape, counts = model.shape, count_parameters(model)
    name = code(architecture(shape).class_name)
    yield f"{name} in float32, written by simbal; `simbal.hf.from_pretrained` reads it back to the bit"
    yield f"{counts['total']:,} parameters, of which a token uses {counts['active']:,}"
    heads = f"{shape.num_heads} heads"
    if shape.kv_heads < shape.num_heads:
        heads += f" that share {shape.kv_heads} of keys and values"
    if shape.head_width * shape.num_heads != shape.d_model:
        heads += f" of width {shape.head_width}"
    yield (
        f"{shape.num_layers} layers of width {shape.d_model}, {heads}{QK_NORMS[shape.qk_norm]}, {shape.vocab_size:,} "
        f"ids, RoPE with theta {shape.rope_theta:g}, RMSNorm with eps {shape.norm_eps:g}, embeddings "
        f"{'tied' if shape.tie_embeddings else 'not tied'}"
    )
    if shape.num_experts:
        yield (
            f"{shape.num_experts} experts of width {shape.d_expert} in every layer, {shape.top_k} per token; softmax "
            "over all of them, then the weights of the chosen "
            + ("divided by their sum" if shape.renormalize else "as they are")
        )
        yield ROUTER
    yield f"trained on sequences of {spec.config.data.seq_len} tokens: later positions are untrained"


def _training(spec: RunSpec, record: dict[str, Any]) -> Iterator[str]:
    yield f"{record['steps']:,} steps, {record['tokens']:,} tokens, seed {spec.config.seed}"
    yield f"data {code(spec.config.data.source)}: {code(json.dumps(record['data'].get('source')))}"
    yield "documents stood one after another, each followed by an end of text; attention went across"
    for key in ("precision", "device", "backend", "router_init", "started", "ended"):
        if record.get(key) is not None:
            yield f"{key.replace('_', ' ')} {code(record[key])}"
    for warning in record.get("warnings") or []:
        yield f"warning: {code(warning)}"


def _balancing(objective: dict[str, Any]) -> Iterator[str]:
    for name, part in objective.items():
        yield f"{code(name)}: {code(part.get('formula'))} ({code(part.get('citation'))})"
        if "coef" in part:
            yield (
                f"its coefficient {code(part['coef'])}, times {code(part.get('schedule'))} as points (step, factor), "
                f"{code(part.get('over_layers'))} over layers: effective coefficient "
                f"{code(part.get('effective_coef'))} of {code(part.get('unit'))}"
            )


def _metrics(record: dict[str, Any]) -> Iterator[str]:
    for name, value in record["metrics"].items():
        definition = record["definitions"].get(name)
        if value is not None:
            yield f"{code(name)} = {value:.6g}" + (f": {code(definition)}" if definition else "")


def _code(record: dict[str, Any]) -> Iterator[str]:
    made = record.get("code") or {}
    changes = ", with uncommitted changes" if made.get("dirty") is True else ""
    yield f"simbal {code(made.get('version'))}, commit {code(made.get('commit'))}{changes}"
    yield ", ".join(f"{code(name)} {code(version)}" for name, version in (record.get("versions") or {}).items())
    yield f"sha256 of the config {code(record['config_hash'])}"
