"""Reads a folder in Hugging Face's format: one of ours, or any of the architectures that compute the same.

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
from simbal.host.weight_files import CONFIG, StoredWeight, read_json, read_weights, require_floats, stored_weights
from simbal.hub.architecture import ARCHITECTURES, Architecture
from simbal.hub.weights import HEAD, views
from simbal.model.transformer import Transformer, TransformerShape

SHOWN = 3  # names in an error
ONLY: dict[str, Any] = {  # keys that our model does not have, with the only value that it computes
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "clip_qkv": None,
    "decoder_sparse_step": 1,
    "quantization_config": None,
    "rope_scaling": None,
    "auto_map": None,
}
ROPE_ONLY = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
SWITCHED_WINDOW = ("qwen3", "qwen3_moe")  # by use_sliding_window
OTHERS = {  # what known models have that ours has not, by model_type
    "deepseek_v2": "shared experts and latent attention",
    "deepseek_v3": "shared experts and latent attention",
    "gpt_oss": "sinks and biases in attention",
    "granitemoe": "multipliers of embeddings, attention, residuals and logits",
    "olmo2": "norms after attention and feed-forward, not before",
    "phimoe": "LayerNorm and sparse mixing of experts",
    "qwen2": "biases in attention",
    "qwen2_moe": "a shared expert and biases in attention",
}


def load(folder: str | PathLike[str], backend: str = "reference") -> Transformer:
    """Return the model of a folder, in fp32, in evaluation mode; `backend` computes its experts, if it has any.

    Only safetensors are read. Nothing is allocated before names and sizes are those that the config.json asks for.

    Raises:
        UserError: a file is missing or damaged, or the model is none of ours; names the key or the weight.
    """
    path = Path(folder)
    shape = read_shape(path / CONFIG)
    stored = stored_weights(path)
    require_floats(stored)
    copy = stored.pop(HEAD, None) if shape.tie_embeddings else None  # some files have tied embeddings twice
    _check(stored, shape, path)
    model = Transformer(shape, backend if shape.num_experts else None)
    targets = views(model)
    for name, weight in read_weights(stored):
        targets[name].copy_(weight)
    if copy and not all(torch.equal(weight.float(), model.head_VD) for _, weight in read_weights({HEAD: copy})):
        raise UserError(f"{path} has tie_word_embeddings=true, and its {HEAD} is not its embedding")
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
        raise UserError(f"{file}: {error}") from None


def _check(stored: dict[str, StoredWeight], shape: TransformerShape, path: Path) -> None:
    """Raise `UserError` unless exactly the weights of a model of this shape are there."""
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
    found = _architecture(config)
    for key, only in ONLY.items():
        _require(key, config.get(key, only), only)
    _require("mlp_only_layers", config.get("mlp_only_layers") or [], [])
    _check_window(config, found)
    d_model, num_heads, num_kv_heads, head_dim = _attention(config, found)
    num_experts = _num_experts(config, found) if found.sparse else 0
    top_k = _size(config, "num_experts_per_tok") if found.sparse else 1
    if found.sparse and top_k > num_experts:
        raise UserError(f"num_experts_per_tok={top_k} is more than {found.experts[-1]}={num_experts}")
    return TransformerShape(
        vocab_size=_size(config, "vocab_size"),
        num_layers=_size(config, "num_hidden_layers"),
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=None if num_kv_heads == num_heads else num_kv_heads,
        head_dim=None if head_dim * num_heads == d_model else head_dim,
        qk_norm=found.qk_norm,
        d_expert=_size(config, found.width),
        num_experts=num_experts,
        top_k=top_k,
        rope_theta=_rope_theta(config, found.rope_theta),
        norm_eps=not_negative("rms_norm_eps", config.get("rms_norm_eps", found.norm_eps)),
        gating="softmax",
        renormalize=not found.free_renormalize or _bool(config, "norm_topk_prob"),
        tie_embeddings=_bool(config, "tie_word_embeddings"),
    )


def _architecture(config: dict[str, Any]) -> Architecture:
    """Return the architecture, by `architectures` and `model_type` together."""
    for each in ARCHITECTURES:
        if config.get("architectures") == [each.class_name] and config.get("model_type") == each.model_type:
            return each
    model_type = config.get("model_type")
    has = OTHERS.get(model_type) if isinstance(model_type, str) else None
    raise UserError(
        f"architectures={config.get('architectures')} with model_type={model_type} is none of "
        f"{', '.join(each.class_name for each in ARCHITECTURES)}"
        + (f": it has {has}, which our model has not" if has else "")
    )


def _attention(config: dict[str, Any], found: Architecture) -> tuple[int, int, int, int]:
    """Return the model's width, its heads, those of keys and values, and the width of a head."""
    d_model, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    head_dim = config.get("head_dim") or found.head_dim
    if head_dim is None and d_model % (2 * num_heads):
        raise UserError(f"hidden_size={d_model} is no multiple of twice num_attention_heads={num_heads}")
    width = d_model // num_heads if head_dim is None else whole_number("head_dim", head_dim, 2)
    if width % 2:
        raise UserError(f"head_dim={width} is odd, and rotary embeddings turn pairs of channels")
    if not found.free_head_dim and width * num_heads != d_model:
        raise UserError(f"head_dim={width} is not supported, only hidden_size / num_attention_heads")
    num_kv_heads = config.get("num_key_value_heads", found.num_kv_heads)
    num_kv_heads = num_heads if num_kv_heads is None else whole_number("num_key_value_heads", num_kv_heads, 1)
    if num_heads % num_kv_heads:
        raise UserError(f"num_key_value_heads={num_kv_heads} does not divide num_attention_heads={num_heads}")
    return d_model, num_heads, num_kv_heads, width


def _num_experts(config: dict[str, Any], found: Architecture) -> int:
    """Return the number of experts, by whichever of its keys there is."""
    given = [key for key in found.experts if key in config] or [found.experts[0]]
    sizes = [_size(config, key) for key in given]
    if len({*sizes}) > 1:
        raise UserError(f"{given[0]}={sizes[0]}, but {given[1]}={sizes[1]}")
    return sizes[0]


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


def _check_window(config: dict[str, Any], found: Architecture) -> None:
    """Raise `UserError` for a sliding window, unless every position fits into it and it changes nothing."""
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UserError(f"layer_types={kinds} is not supported, only full_attention")
    window = config.get("sliding_window")
    if found.model_type in SWITCHED_WINDOW and not _bool(config, "use_sliding_window"):
        return
    if window is not None and whole_number("sliding_window", window, 1) < _size(config, "max_position_embeddings"):
        raise UserError(
            f"sliding_window={window} is shorter than max_position_embeddings={config['max_position_embeddings']}: our "
            "attention sees all of the past"
        )


def _size(config: dict[str, Any], key: str) -> int:
    if key not in config:
        raise UserError(f"{key} is missing")
    return whole_number(key, config[key], 1)


def _bool(config: dict[str, Any], key: str) -> bool:
    """Return a value that is false where it is not given."""
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise UserError(f"{key}={value} must be true or false")
    return value


def _require(key: str, value: Any, only: Any) -> None:
    if value != only:
        raise UserError(f"{key}={value} is not supported, only {only}")
