"""Converts between simbal's Transformer and the folders of five architectures of transformers that compute the same.

    from simbal import hf
    model = hf.from_pretrained("folder")           # a Transformer; LitMoE and every analysis take it
    hidden_BSD, routings = model(tokens_BS)
    logits_BSV = hidden_BSD @ model.head_VD.T

Each weight's name on disk has a view of our parameter, so that the same list writes a folder and reads one. These are
the classic names, with a matrix for each expert: transformers merges the experts when it reads them, and writes these
names again.
Reference: transformers 5.23, models/mixtral, llama, olmoe, qwen3 and qwen3_moe, and conversion_mapping.py.
Shapes: B sequences, S tokens, V vocabulary, D model width, E experts, F hidden width of an expert or of the dense
feed-forward.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from simbal.errors import UserError
from simbal.model.attention import Attention
from simbal.model.moe import FeedForward, MoELayer
from simbal.model.transformer import Block, Transformer, TransformerShape

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"
IN_MIXTRAL, ELSEWHERE = ("block_sparse_moe", "w1", "w3", "w2"), ("mlp", "gate_proj", "up_proj", "down_proj")
ONLY: dict[str, Any] = {  # keys that our model does not have, with the only value that it computes
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "clip_qkv": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "quantization_config": None,
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
}
ROPE_ONLY = {"rope_type": "default", "partial_rotary_factor": 1.0}


@dataclass(frozen=True)
class Architecture:
    """A class of transformers with what sets it apart, and what it takes where its config.json says nothing.

    Which one a model is follows from its experts and from the norms of its queries and keys.
    """

    name: str  # in sentences
    class_name: str
    model_type: str
    sparse: bool
    qk_norm: str  # as in `TransformerShape`
    rope_theta: float
    norm_eps: float
    num_kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    free_head_dim: bool = True  # whether its config can say another
    free_renormalize: bool = False  # whether norm_topk_prob says that chosen weights are divided by their sum
    switched_window: bool = False  # whether a sliding window counts only with use_sliding_window
    width: str = "intermediate_size"  # the key of the width of an expert or of the dense feed-forward
    experts: tuple[str, ...] = ("num_experts", "num_local_experts")  # the keys of their number: what is written first


MIXTRAL = Architecture(
    "Mixtral", "MixtralForCausalLM", "mixtral", True, "none", 1e6, 1e-5, num_kv_heads=8, experts=("num_local_experts",)
)
OLMOE = Architecture(
    "OLMoE", "OlmoeForCausalLM", "olmoe", True, "projection", 1e4, 1e-5, free_head_dim=False, free_renormalize=True
)
QWEN3_MOE = Architecture(
    "Qwen3-MoE", "Qwen3MoeForCausalLM", "qwen3_moe", True, "head", 1e4, 1e-6, num_kv_heads=4, free_renormalize=True,
    switched_window=True, width="moe_intermediate_size",
)  # fmt: skip
LLAMA = Architecture("Llama", "LlamaForCausalLM", "llama", False, "none", 1e4, 1e-6)
QWEN3 = Architecture(
    "Qwen3", "Qwen3ForCausalLM", "qwen3", False, "head", 1e4, 1e-6, num_kv_heads=32, head_dim=128, switched_window=True
)
ARCHITECTURES = (MIXTRAL, LLAMA, OLMOE, QWEN3_MOE, QWEN3)


def architecture(shape: TransformerShape) -> Architecture:
    """Return the architecture that computes a model of this shape; `UserError`, with the key, if there is none."""
    kinds = [each for each in ARCHITECTURES if (each.sparse, each.qk_norm) == (shape.num_experts > 0, shape.qk_norm)]
    if not kinds:
        raise UserError(f"model.qk_norm={shape.qk_norm} with model.num_experts=0: no dense architecture has it")
    found, name = kinds[0], kinds[0].name
    if shape.document_end is not None:
        raise UserError(f"data.document_mask=true: attention of {name} goes beyond the document")
    if shape.bias:
        raise UserError(f"model.bias=true: feed-forwards of {name} as it is written have no biases")
    if shape.num_shared_experts:
        raise UserError(f"model.num_shared_experts={shape.num_shared_experts}: every expert of {name} is chosen")
    if shape.num_experts and shape.gating != "softmax":
        raise UserError(f"router.gating={shape.gating}: {name} gates by a softmax")
    if shape.num_experts and not shape.renormalize and not found.free_renormalize:
        raise UserError(f"router.renormalize=false: {name} divides the chosen weights by their sum")
    if shape.head_width * shape.num_heads != shape.d_model and not found.free_head_dim:
        raise UserError(f"model.head_dim={shape.head_dim}: heads of {name} are of width d_model / num_heads")
    if shape.d_model % shape.num_heads and found is LLAMA:
        raise UserError(f"model.d_model={shape.d_model}: in {name} it is a multiple of model.num_heads")
    return found


def config_json(shape: TransformerShape, seq_len: int, end_of_text: int) -> dict[str, Any]:
    """Return the config from which transformers and vLLM build the model.

    Args:
        shape: of a model that has an `architecture`.
        seq_len: tokens of a training sequence: no later position was ever trained.
        end_of_text: the id that stands after every document, and so before every next one.
    """
    found = architecture(shape)
    config = {
        "architectures": [found.class_name],
        "model_type": found.model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,  # transformers 4 and older vLLM
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},  # transformers 5
        "max_position_embeddings": seq_len,
        "tie_word_embeddings": shape.tie_embeddings,
        "attention_dropout": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": "float32",
        found.width: max(1, shape.top_k) * shape.d_expert if not found.sparse else shape.d_expert,
    }
    if found.free_head_dim:
        config |= {"head_dim": shape.head_width}
    if found.sparse:
        config |= {found.experts[0]: shape.num_experts, "num_experts_per_tok": shape.top_k}
    if found.free_renormalize:
        config |= {"norm_topk_prob": shape.renormalize}
    if found.switched_window:
        config |= {"use_sliding_window": False}
    own: dict[Architecture, dict[str, Any]] = {
        MIXTRAL: {"router_jitter_noise": 0.0, "sliding_window": None},
        OLMOE: {"attention_bias": False, "clip_qkv": None},
        QWEN3_MOE: {  # every layer has experts, and intermediate_size is the width of layers without
            "attention_bias": False, "sliding_window": None, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "intermediate_size": shape.d_expert,
        },
        LLAMA: {"attention_bias": False, "mlp_bias": False},
        QWEN3: {"attention_bias": False, "sliding_window": None},
    }  # fmt: skip
    return config | own[found]


def views(model: Transformer) -> dict[str, Tensor]:
    """Return a view of every weight by its name on disk; what is copied into a view is copied into the model.

    Matrices are (out, in). A router whose weight is computed (`ortho_param`) gives what it computes now, into which
    nothing can be copied. Tied embeddings have one name, as in files that transformers writes.
    """
    named = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm.weight}
    if not model.shape.tie_embeddings:
        named[HEAD] = model.head_VD
    names = IN_MIXTRAL if architecture(model.shape) is MIXTRAL else ELSEWHERE
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        prefix = f"model.layers.{layer}."
        named[f"{prefix}input_layernorm.weight"] = block.attention_norm.weight
        named[f"{prefix}post_attention_layernorm.weight"] = block.feed_forward_norm.weight
        for name, weight in (*_attention(block.attention), *_feed_forward(block.feed_forward, *names)):
            named[f"{prefix}{name}.weight"] = weight
    return {name: weight.detach() for name, weight in named.items()}


def _attention(attention: Attention) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and the four matrices of attention, and the gains of its norms if it has any.

    Heads are rows one below another in both formats, and both turn channel i with i + P/2.
    """
    for name, weight in zip("qkv", torch.split(attention.qkv.weight, attention.widths), strict=True):
        yield f"self_attn.{name}_proj", weight
    yield "self_attn.o_proj", attention.out.weight
    for name, norm in (("q", attention.q_norm), ("k", attention.k_norm)):
        if norm is not None:
            yield f"self_attn.{name}_norm", norm.weight


def _feed_forward(
    layer: MoELayer | FeedForward, prefix: str, gate: str, up: str, down: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and matrices of a feed-forward; `gate`, `up` and `down` are what its projections are called."""
    if isinstance(layer, FeedForward):
        parts = [(prefix, layer.w13_2FD, layer.w2_FD)]
    else:
        yield f"{prefix}.gate", layer.router.weight_ED
        experts = enumerate(zip(layer.w13_E2FD, layer.w2_EFD, strict=True))
        parts = [(f"{prefix}.experts.{expert}", w13_2FD, w2_FD) for expert, (w13_2FD, w2_FD) in experts]
    for name, w13_2FD, w2_FD in parts:
        yield f"{name}.{gate}", w13_2FD[0]
        yield f"{name}.{up}", w13_2FD[1]
        yield f"{name}.{down}", w2_FD.T


def from_pretrained(folder: str | PathLike[str], backend: str = "reference") -> Transformer:
    """Return the model of a folder, in fp32, in evaluation mode; `backend` computes its experts, if it has any.

    Only safetensors are read: nothing in the folder is executed.

    Raises:
        UserError: a file is missing or damaged, or our Transformer computes something else; names the key or weight.
    """
    path = Path(folder)
    try:
        shape = shape_of(read_json(path / CONFIG))
    except KeyError as key:
        raise UserError(f"{path / CONFIG} lacks {key}") from None
    model = Transformer(shape, backend if shape.num_experts else None)
    missing = views(model)
    for file in weight_files(path):
        with opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  it is no dict
                if name == HEAD and shape.tie_embeddings:
                    continue  # some files have tied embeddings twice
                weight = tensors.get_tensor(name)
                if name not in missing:
                    raise UserError(f"{path} has a weight that our model has not: {name}")
                target = missing.pop(name)
                if weight.shape != target.shape:
                    raise UserError(
                        f"{path}: {name} has the shape {(*weight.shape,)}, and by its {CONFIG} {(*target.shape,)}"
                    )
                target.copy_(weight)
    if missing:
        raise UserError(f"{path} lacks the weight {min(missing)}")
    return model.eval()


def shape_of(config: Mapping[str, Any]) -> TransformerShape:
    """Return the shape that a config.json describes.

    A dense one comes back with top_k 1 and the whole width as d_expert, however it was divided in training.

    Raises:
        UserError: our Transformer computes something else; names the key and its value.
        KeyError: a key is missing.
    """
    known = {each.model_type: each for each in ARCHITECTURES}
    if config.get("model_type") not in known:
        raise UserError(f"model_type={config.get('model_type')} is none of {', '.join(known)}")
    found = known[config["model_type"]]
    rope = config.get("rope_parameters") or {}
    _require(config, ONLY)
    _require(rope, ROPE_ONLY, "rope_parameters.")
    _require_full_attention(config, found)
    d_model, num_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or found.head_dim or d_model // num_heads
    if not found.free_head_dim and head_dim * num_heads != d_model:
        raise UserError(f"head_dim={head_dim} is not supported, only hidden_size / num_attention_heads")
    num_kv_heads = config.get("num_key_value_heads", found.num_kv_heads) or num_heads
    experts_key = next((key for key in found.experts if key in config), found.experts[0])
    return TransformerShape(
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=None if num_kv_heads == num_heads else num_kv_heads,
        head_dim=None if head_dim * num_heads == d_model else head_dim,
        qk_norm=found.qk_norm,
        d_expert=config[found.width],
        num_experts=config[experts_key] if found.sparse else 0,
        top_k=config["num_experts_per_tok"] if found.sparse else 1,
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", found.rope_theta))),
        norm_eps=float(config.get("rms_norm_eps", found.norm_eps)),
        gating="softmax",
        renormalize=bool(config.get("norm_topk_prob")) or not found.free_renormalize,
        tie_embeddings=bool(config.get("tie_word_embeddings")),
    )


def _require(config: Mapping[str, Any], only: Mapping[str, Any], prefix: str = "") -> None:
    """Raise `UserError` for a key with another value than the only one that our model computes."""
    for key, value in only.items():
        if (config.get(key) or value) != value:
            raise UserError(f"{prefix}{key}={config[key]} is not supported, only {value}")


def _require_full_attention(config: Mapping[str, Any], found: Architecture) -> None:
    """Raise `UserError` for a sliding window, unless every position fits into it and it changes nothing."""
    kinds = {*(config.get("layer_types") or [])} - {"full_attention"}
    window = None if found.switched_window and not config.get("use_sliding_window") else config.get("sliding_window")
    if kinds or (window is not None and window < config["max_position_embeddings"]):
        named = f"layer_types={sorted(kinds)}" if kinds else f"sliding_window={window}"
        raise UserError(f"{named} is not supported: our attention sees all of the past")


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object from a file; `UserError` if it cannot be read."""
    try:
        content: dict[str, Any] = orjson.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return content


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors of a folder, one file or those of its index; `UserError` if there are none."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        return [folder / name for name in sorted({*read_json(folder / INDEX)["weight_map"].values()})]
    raise UserError(
        f"{folder} has neither {SINGLE} nor {INDEX}: weights in other formats are not read, as they can hold programs; "
        "save_pretrained of transformers writes safetensors"
    )


def opened(file: Path) -> Any:
    """Open a file of safetensors; `UserError` if it is missing or damaged."""
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
