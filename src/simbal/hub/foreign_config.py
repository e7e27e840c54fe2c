"""The config.json of a Mixtral or Llama as a Transformer's shape, or why it is none.

What transformers' two model classes read of a config is checked key by key; keys that they do not know change nothing.
Reference: configuration_mixtral.py and configuration_llama.py of transformers 5.23, whose defaults stand for what is
missing; older versions write `rope_theta` and `rope_scaling` in place of `rope_parameters`.
"""

from pathlib import Path
from typing import Any

from simbal.checks import not_negative, whole_number
from simbal.errors import UserError
from simbal.hub.architecture import LLAMA, MIXTRAL, MODEL_TYPES
from simbal.hub.weight_files import read_json
from simbal.model.transformer import TransformerShape
from simbal.printable import printable

LARGEST = 2**20  # of a size: the elements of any weight can be counted in 63 bits
LONGEST = 500  # characters of an error that repeats what the file says
ONLY: dict[str, Any] = {  # what our model has no key for: the only value that it computes
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


def read_shape(file: Path) -> TransformerShape:
    """The shape that a config.json describes.

    A dense one comes back with top_k 1 and the whole width as d_expert, however it was divided in training.

    Raises:
        UserError: the file is damaged, or describes what our Transformer is not; names the key and its value.
    """
    config = read_json(file)
    try:
        return _shape(config)
    except UserError as error:
        raise UserError(f"{file}: {' '.join(printable(str(error)).split())[:LONGEST]}") from None


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
    """MIXTRAL or LLAMA, by `architectures` and `model_type` together."""
    for name, model_type in MODEL_TYPES.items():
        if config.get("architectures") == [name] and config.get("model_type") == model_type:
            return name
    raise UserError(
        f"architectures={config.get('architectures')} with model_type={config.get('model_type')} is neither "
        f"{MIXTRAL} nor {LLAMA}"
    )


def _rope_theta(config: dict[str, Any], default: float) -> float:
    """From `rope_parameters`, or beside it."""
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
    """A sliding window changes nothing if every position fits into it."""
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
