"""Conversion between simbal's Transformer and five Hugging Face architectures that compute the same function.

    from simbal import hf
    model = hf.from_pretrained("folder")           # a Transformer, which LitMoE and every analysis accept
    hidden_BSD, routings = model(tokens_BS)
    logits_BSV = hidden_BSD @ model.head_VD.T

`named_weights` maps each weight name in a file to a view of our parameter, both for reading and for writing a folder.
Weights are named as in published checkpoints: separate matrices for each expert. transformers merges the experts when
it loads a model and splits them again when it saves one.
Reference: transformers 5.23, models/{mixtral,llama,olmoe,qwen3,qwen3_moe} and conversion_mapping.py.
Shapes: B sequences, S tokens, V vocabulary, D model width, E experts, F hidden width of an expert or of the dense
feed-forward.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from simbal.errors import UserError
from simbal.model.attention import Attention
from simbal.model.moe import FeedForward, MoELayer
from simbal.model.transformer import Block, Transformer, TransformerShape

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"
MIXTRAL_NAMES, USUAL_NAMES = ("block_sparse_moe", "w1", "w3", "w2"), ("mlp", "gate_proj", "up_proj", "down_proj")
SUPPORTED_VALUES: dict[str, Any] = {  # config keys without a counterpart in our model, with the only supported value
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "clip_qkv": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "quantization_config": None,
}
SUPPORTED_ROPE = {"rope_type": "default", "partial_rotary_factor": 1.0}


@dataclass(frozen=True)
class Architecture:
    """A transformers architecture. `sparse` and `qk_norm` determine it."""

    name: str  # in messages
    class_name: str
    model_type: str
    sparse: bool
    qk_norm: str  # as in `TransformerShape`
    any_head_dim: bool = True  # the config has `head_dim`
    any_renormalize: bool = False  # the config has `norm_topk_prob`; otherwise the chosen weights sum to 1
    width: str = "intermediate_size"  # key of the width of an expert or of the dense feed-forward


MIXTRAL = Architecture("Mixtral", "MixtralForCausalLM", "mixtral", True, "none")
LLAMA = Architecture("Llama", "LlamaForCausalLM", "llama", False, "none")
OLMOE = Architecture("OLMoE", "OlmoeForCausalLM", "olmoe", True, "projection", any_head_dim=False, any_renormalize=True)
QWEN3_MOE = Architecture(
    "Qwen3-MoE", "Qwen3MoeForCausalLM", "qwen3_moe", True, "head", any_renormalize=True, width="moe_intermediate_size"
)
QWEN3 = Architecture("Qwen3", "Qwen3ForCausalLM", "qwen3", False, "head")
ARCHITECTURES = (MIXTRAL, LLAMA, OLMOE, QWEN3_MOE, QWEN3)


def architecture_of(shape: TransformerShape) -> Architecture:
    """Return the architecture that computes a model of this shape.

    Raises:
        UserError: there is no such architecture. The message names the config key.
    """
    architecture = next(
        (a for a in ARCHITECTURES if (a.sparse, a.qk_norm) == (shape.num_experts > 0, shape.qk_norm)), None
    )
    if architecture is None:
        raise UserError(f"model.qk_norm={shape.qk_norm} with model.num_experts=0: no dense architecture has this norm")
    name = architecture.name
    if shape.document_end is not None:
        raise UserError(f"data.document_mask=true: attention in {name} is not limited to a document")
    if shape.attention_scale is not None:
        raise UserError(
            f"optim.mup=true with heads of another width than optim.mup_base_head_dim: {name} cannot scale attention"
        )
    if shape.bias:
        raise UserError(f"model.bias=true: {name} feed-forwards have no bias")
    if shape.num_shared_experts:
        raise UserError(f"model.num_shared_experts={shape.num_shared_experts}: {name} has no shared experts")
    if shape.num_experts and shape.gating != "softmax":
        raise UserError(f"router.gating={shape.gating}: {name} uses softmax gating")
    if shape.num_experts and shape.router_scale != 1:
        raise UserError(f"router.scale={shape.router_scale}: {name} does not scale the weights of the chosen experts")
    if shape.num_experts and shape.router_input != "hidden":
        raise UserError(f"router.input={shape.router_input}: routers of {name} read hidden states")
    if shape.token_table:
        raise UserError(f"model.token_table=true: {name} has no learned vector per token id and layer")
    if shape.num_experts and not shape.renormalize and not architecture.any_renormalize:
        raise UserError(f"router.renormalize=false: {name} always renormalizes the weights of the chosen experts")
    if shape.head_width * shape.num_heads != shape.d_model and not architecture.any_head_dim:
        raise UserError(f"model.head_dim={shape.head_dim}: {name} needs head_dim = d_model / num_heads")
    if shape.d_model % shape.num_heads and architecture is LLAMA:
        raise UserError(f"model.d_model={shape.d_model}: {name} needs a multiple of model.num_heads")
    return architecture


def hf_config(shape: TransformerShape, seq_len: int, end_of_text: int) -> Any:
    """Return the transformers config of a model.

    Args:
        shape: shape of the model.
        seq_len: length of the training sequences in tokens, written as the maximum context length.
        end_of_text: token id that ends every document, written as BOS and EOS.
    """
    from transformers import AutoConfig

    architecture = architecture_of(shape)
    keys = {
        "architectures": [architecture.class_name],
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": seq_len,
        "tie_word_embeddings": shape.tie_embeddings,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "dtype": "float32",
        architecture.width: shape.d_expert if architecture.sparse else max(1, shape.top_k) * shape.d_expert,
    }
    if architecture.any_head_dim:
        keys["head_dim"] = shape.head_width
    if architecture.sparse:
        keys |= {"num_experts": shape.num_experts, "num_experts_per_tok": shape.top_k}
    if architecture.any_renormalize:
        keys["norm_topk_prob"] = shape.renormalize
    config = AutoConfig.for_model(architecture.model_type, **keys)
    config.rope_theta = shape.rope_theta  # transformers 4 and older vLLM do not read rope_parameters
    return config


def named_weights(model: Transformer) -> dict[str, Tensor]:
    """Return a view of every weight by its name in a file. Writing to a view changes the model.

    Matrices are (out, in). The weight of a parametrized router (`ortho_param`) is computed and cannot be written to.
    Tied embeddings appear once, as in transformers files.
    """
    weights = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm.weight}
    if not model.shape.tie_embeddings:
        weights[HEAD] = model.head_VD
    names = MIXTRAL_NAMES if architecture_of(model.shape) is MIXTRAL else USUAL_NAMES
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        prefix = f"model.layers.{layer}."
        weights[f"{prefix}input_layernorm.weight"] = block.attention_norm.weight
        weights[f"{prefix}post_attention_layernorm.weight"] = block.feed_forward_norm.weight
        for name, weight in (*_attention_weights(block.attention), *_expert_weights(block.feed_forward, *names)):
            weights[f"{prefix}{name}.weight"] = weight
    return {name: weight.detach() for name, weight in weights.items()}


def _attention_weights(attention: Attention) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and weights of attention. Both formats stack heads as rows and rotate channels (i, i + P/2)."""
    for name, weight in zip("qkv", torch.split(attention.qkv.weight, attention.widths), strict=True):
        yield f"self_attn.{name}_proj", weight
    yield "self_attn.o_proj", attention.out.weight
    for name, norm in (("q", attention.q_norm), ("k", attention.k_norm)):
        if norm is not None:
            yield f"self_attn.{name}_norm", norm.weight


def _expert_weights(
    layer: MoELayer | FeedForward, prefix: str, gate: str, up: str, down: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and matrices of a feed-forward layer, with projections named `gate`, `up` and `down`."""
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
    """Load a Mixtral, OLMoE, Qwen3-MoE, Llama or Qwen3 folder as a `Transformer` in fp32 and evaluation mode.

    Only safetensors are loaded, and no code in the folder is executed.

    Args:
        folder: folder with config.json and weights.
        backend: implementation of the experts.

    Raises:
        UserError: a file is missing or damaged, or our Transformer cannot compute this model. The message names the
            config key or weight.
    """
    path = Path(folder)
    shape = shape_of(read_config(path))
    model = Transformer(shape, backend if shape.num_experts else None)
    missing = named_weights(model)
    for file in weight_files(path):
        with open_weights(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a dict
                if name == HEAD and shape.tie_embeddings:
                    continue  # some files contain tied embeddings twice
                if name not in missing:
                    raise UserError(f"{path} has an unexpected weight: {name}")
                weight, target = tensors.get_tensor(name), missing.pop(name)
                if weight.shape != target.shape:
                    shapes = f"{(*weight.shape,)}, but {CONFIG} requires {(*target.shape,)}"
                    raise UserError(f"{path}: {name} has shape {shapes}")
                target.copy_(weight)
    if missing:
        raise UserError(f"{path} lacks the weight {min(missing)}")
    return model.eval()


def shape_of(config: Any) -> TransformerShape:
    """Return the shape of the model that a transformers config describes.

    A dense model gets top_k=1 and its full width as d_expert.

    Raises:
        UserError: our Transformer cannot compute this model. The message names the key and its value.
    """
    known = {each.model_type: each for each in ARCHITECTURES}
    if config.model_type not in known:
        raise UserError(f"model_type={config.model_type} is not supported; supported: {', '.join(known)}")
    architecture = known[config.model_type]
    rope = config.rope_parameters
    for prefix, values, supported in (
        ("", config.to_dict(), SUPPORTED_VALUES),
        ("rope_parameters.", rope, SUPPORTED_ROPE),
    ):
        for key, value in supported.items():
            if (values.get(key) or value) != value:
                raise UserError(f"{prefix}{key}={values[key]} is not supported, only {value}")
    kinds = {*(getattr(config, "layer_types", None) or [])} - {"full_attention"}
    window = getattr(config, "sliding_window", None)
    if kinds or (window is not None and window < config.max_position_embeddings):
        setting = f"layer_types={sorted(kinds)}" if kinds else f"sliding_window={window}"
        raise UserError(f"{setting} is not supported: our attention has no sliding window")
    d_model, num_heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or d_model // num_heads
    if not architecture.any_head_dim and head_dim * num_heads != d_model:
        raise UserError(f"head_dim={head_dim} is not supported, only hidden_size / num_attention_heads")
    return TransformerShape(
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=None if config.num_key_value_heads == num_heads else config.num_key_value_heads,
        head_dim=None if head_dim * num_heads == d_model else head_dim,
        qk_norm=architecture.qk_norm,
        d_expert=getattr(config, architecture.width),
        num_experts=config.num_experts if architecture.sparse else 0,
        top_k=config.num_experts_per_tok if architecture.sparse else 1,
        rope_theta=float(rope["rope_theta"]),
        norm_eps=config.rms_norm_eps,
        gating="softmax",
        renormalize=config.norm_topk_prob if architecture.any_renormalize else True,
        tie_embeddings=config.tie_word_embeddings,
    )


def read_config(folder: Path) -> Any:
    """Return the transformers config in a folder. No code in the folder is executed.

    Raises:
        UserError: config.json is missing or damaged, transformers does not know the architecture, or transformers is
            not installed.
    """
    require_transformers()
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises errors of many types
        raise UserError(f"{folder / CONFIG} cannot be read: {on_one_line(error)}") from None


def require_transformers() -> None:
    """Raise `UserError` if transformers is not installed."""
    if find_spec("transformers") is None:
        raise UserError("transformers is not installed: pip install 'simbal[hf]'")


def on_one_line(error: Exception) -> str:
    """Return an error message on one line, or the error's type if it has no message."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder; `UserError` if it has none."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        names = {*json.loads((folder / INDEX).read_bytes())["weight_map"].values()}
        return [folder / name for name in sorted(names)]
    raise UserError(
        f"{folder} has no {SINGLE} or {INDEX}: save the model with save_pretrained, as pickles are not loaded"
    )


def open_weights(file: Path) -> Any:
    """Open a safetensors file; `UserError` if it is missing or damaged."""
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
