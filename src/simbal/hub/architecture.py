"""The architectures of transformers that compute what our Transformer does, and their config.json.

Reference: transformers 5.23, models/mixtral, llama, olmoe, qwen3 and qwen3_moe.
"""

from dataclasses import dataclass
from typing import Any

from simbal.errors import UserError
from simbal.model.transformer import TransformerShape


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
    width="moe_intermediate_size",
)  # fmt: skip
LLAMA = Architecture("Llama", "LlamaForCausalLM", "llama", False, "none", 1e4, 1e-6)
QWEN3 = Architecture("Qwen3", "Qwen3ForCausalLM", "qwen3", False, "head", 1e4, 1e-6, num_kv_heads=32, head_dim=128)
ARCHITECTURES = (MIXTRAL, LLAMA, OLMOE, QWEN3_MOE, QWEN3)


def architecture(shape: TransformerShape) -> Architecture:
    """Return the architecture with this shape's norms of queries and keys; `UserError` if there is none."""
    for each in ARCHITECTURES:
        if (each.sparse, each.qk_norm) == (shape.num_experts > 0, shape.qk_norm):
            return each
    raise UserError(
        f"model.qk_norm={shape.qk_norm} with model.num_experts=0: no dense architecture with a norm before attention "
        "has it"
    )


def require_expressible(shape: TransformerShape) -> None:
    """Raise `UserError`, with the key and its value, for a shape that no architecture computes."""
    found = architecture(shape)
    name = found.name
    if shape.document_end is not None:
        raise UserError("data.document_mask=true: attention there goes beyond the document")
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


def config_json(shape: TransformerShape, seq_len: int, end_of_text: int) -> dict[str, Any]:
    """Return the config from which transformers and vLLM build the model.

    Args:
        shape: one that `require_expressible` lets pass.
        seq_len: tokens of a training sequence: no later position was ever trained.
        end_of_text: the id that stands after every document, and so before every next one.
    """
    found = architecture(shape)
    common = {
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
    }
    if found.free_head_dim:
        common |= {"head_dim": shape.head_width}
    return common | (_of_experts(shape, found) if found.sparse else _of_dense(shape, found))


def _of_experts(shape: TransformerShape, found: Architecture) -> dict[str, Any]:
    keys = {
        found.width: shape.d_expert,
        found.experts[0]: shape.num_experts,
        "num_experts_per_tok": shape.top_k,
    }
    if found is MIXTRAL:
        return keys | {"router_jitter_noise": 0.0, "sliding_window": None}
    keys |= {"norm_topk_prob": shape.renormalize, "attention_bias": False}
    if found is OLMOE:
        return keys | {"clip_qkv": None}
    # every layer has experts, and intermediate_size is the width of layers without
    return keys | _of_qwen3() | {"decoder_sparse_step": 1, "mlp_only_layers": [], "intermediate_size": shape.d_expert}


def _of_dense(shape: TransformerShape, found: Architecture) -> dict[str, Any]:
    keys = {found.width: max(1, shape.top_k) * shape.d_expert, "attention_bias": False}
    return keys | (_of_qwen3() if found is QWEN3 else {"mlp_bias": False})


def _of_qwen3() -> dict[str, Any]:
    return {"use_sliding_window": False, "sliding_window": None}
