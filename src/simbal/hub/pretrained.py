"""Reads a folder in Hugging Face's format: one of ours, or any Mixtral or Llama of the same kind.

    from simbal import hub
    model = hub.load("folder")                     # a Transformer; LitMoE and every analysis take it
    hidden_BSD, routings = model(tokens_BS)
    logits_BSV = hidden_BSD @ model.head_VD.T

Shapes: B sequences, S tokens, V vocabulary, D model width.
"""

from os import PathLike
from pathlib import Path
from typing import Any

import torch

from simbal.config.values import not_negative, whole_number
from simbal.errors import UserError
from simbal.files.printable import printable
from simbal.hub.architecture import LLAMA, MIXTRAL, MODEL_TYPES
from simbal.hub.digests import CONFIG, require_written
from simbal.hub.weight_files import StoredWeight, read_json, read_weights, stored_weights
from simbal.hub.weights import count, views
from simbal.model.transformer import Transformer, TransformerShape

SHOWN = 3  # names in an error
LARGEST = 2**20  # the largest size: the elements of any weight can then be counted in 63 bits
LONGEST = 500  # characters of an error that repeats what the file says
ONLY: dict[str, Any] = {  # keys that our model does not have, with the only value that it computes
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "quantization_config": None,
    "rope_scaling": None,
    "auto_map": None,
}
ROPE_ONLY = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
KEY_VALUE_HEADS = 8  # Mixtral's default
ROPE_THETA = {MIXTRAL: 1e6, LLAMA: 1e4}
NORM_EPS = {MIXTRAL: 1e-5, LLAMA: 1e-6}


def load(folder: str | PathLike[str], backend: str = "reference") -> Transformer:
    """Return the model of a folder, in fp32, in evaluation mode; `backend` computes its experts, if it has any.

    Only safetensors are read. Nothing is allocated before names and sizes are those that the config.json asks for.

    Raises:
        UserError: a file is missing or damaged, or the model is none of ours; names the key or the weight.
    """
    path = Path(folder)
    require_written(path)
    shape = read_shape(path / CONFIG)
    stored = stored_weights(path)
    _check(stored, shape, path)
    model = Transformer(shape, backend if shape.num_experts else None)
    targets = views(model)
    for name, weight in read_weights(stored):
        targets[name].copy_(weight)
    return model.eval()


def read_shape(file: Path) -> TransformerShape:
    """Return the shape that a config.json describes.

    A dense one comes back with top_k 1 and the whole width as d_expert, however it was divided in training.

    Raises:
        UserError: the file is damaged, or describes what our Transformer is not; names the key and its value.
    """
    config = read_json(file)
    try:
        return _shape(config)
    except UserError as error:
        raise UserError(f"{file}: {' '.join(printable(str(error)).split())[:LONGEST]}") from None


def _check(stored: dict[str, StoredWeight], shape: TransformerShape, path: Path) -> None:
    """Raise `UserError` unless exactly the weights of a model of this shape are there."""
    expected = count(shape.num_layers, shape.num_experts)
    if len(stored) < expected:  # before a list is made, of a length that the config alone asks for
        raise UserError(f"{path} has {len(stored)} weights, and a model of its config.json {expected}")
    with torch.device("meta"):
        wanted = {name: tuple(view.shape) for name, view in views(Transformer(shape, "reference")).items()}
    if unknown := sorted(stored.keys() - wanted.keys()):
        raise UserError(f"{path} has weights that our model has not: {', '.join(map(repr, unknown[:SHOWN]))}")
    if missing := sorted(wanted.keys() - stored.keys()):
        raise UserError(f"{path} lacks the weights {', '.join(missing[:SHOWN])}")
    for name, size in wanted.items():
        if stored[name].shape != size:
            raise UserError(f"{path}: {name} has the shape {stored[name].shape}, and by its config.json {size}")


def _shape(config: dict[str, Any]) -> TransformerShape:
    name = _architecture(config)
    sparse = name == MIXTRAL
    for key, only in ONLY.items():
        _require(key, config.get(key, only), only)
    d_model, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    if d_model % (2 * num_heads):
        raise UserError(f"hidden_size={d_model} is no multiple of twice num_attention_heads={num_heads}")
    shared = config.get("num_key_value_heads", KEY_VALUE_HEADS if sparse else num_heads)
    _require("num_key_value_heads", num_heads if shared is None else shared, num_heads)
    _require("head_dim", config.get("head_dim") or d_model // num_heads, d_model // num_heads)
    _check_window(config)
    num_experts = _size(config, "num_local_experts") if sparse else 0
    top_k = _size(config, "num_experts_per_tok") if sparse else 1
    if sparse and top_k > num_experts:
        raise UserError(f"num_experts_per_tok={top_k} is more than num_local_experts={num_experts}")
    return TransformerShape(
        vocab_size=_size(config, "vocab_size"),
        num_layers=_size(config, "num_hidden_layers"),
        d_model=d_model,
        num_heads=num_heads,
        d_expert=_size(config, "intermediate_size"),
        num_experts=num_experts,
        top_k=top_k,
        rope_theta=_rope_theta(config, ROPE_THETA[name]),
        norm_eps=not_negative("rms_norm_eps", config.get("rms_norm_eps", NORM_EPS[name])),
        gating="softmax",
        renormalize=True,
    )


def _architecture(config: dict[str, Any]) -> str:
    """Return MIXTRAL or LLAMA, by `architectures` and `model_type` together."""
    for name, model_type in MODEL_TYPES.items():
        if config.get("architectures") == [name] and config.get("model_type") == model_type:
            return name
    raise UserError(
        f"architectures={config.get('architectures')} with model_type={config.get('model_type')} is neither "
        f"{MIXTRAL} nor {LLAMA}"
    )


def _rope_theta(config: dict[str, Any], default: float) -> float:
    """Return the base of the rotary embeddings, from `rope_parameters` or the key `rope_theta` beside it."""
    rope = config.get("rope_parameters")
    rope = {} if rope is None else rope
    if not isinstance(rope, dict):
        raise UserError(f"rope_parameters={rope} must hold keys with values")
    for key, only in ROPE_ONLY.items():
        _require(f"rope_parameters.{key}", rope.get(key, only), only)
    _require("partial_rotary_factor", config.get("partial_rotary_factor", 1.0), 1.0)
    theta = not_negative("rope_theta", rope.get("rope_theta", config.get("rope_theta", default)))
    if theta == 0:
        raise UserError("rope_theta=0 must be above 0")
    return theta


def _check_window(config: dict[str, Any]) -> None:
    """Raise `UserError` for a sliding window, unless every position fits into it and it changes nothing."""
    window = config.get("sliding_window")
    if window is not None and whole_number("sliding_window", window, 1) < _size(config, "max_position_embeddings"):
        raise UserError(
            f"sliding_window={window} is shorter than max_position_embeddings={config['max_position_embeddings']}: our "
            "attention sees all of the past"
        )


def _size(config: dict[str, Any], key: str) -> int:
    if key not in config:
        raise UserError(f"{key} is missing")
    if whole_number(key, config[key], 1) > LARGEST:
        raise UserError(f"{key}={config[key]} is more than {LARGEST}")
    return int(config[key])


def _require(key: str, value: Any, only: Any) -> None:
    if value != only:
        raise UserError(f"{key}={value} is not supported, only {only}")
