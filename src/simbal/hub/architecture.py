"""The config.json of a Transformer's shape, as Hugging Face's Mixtral (sparse) or Llama (dense)."""

from typing import Any

from simbal.model.transformer import TransformerShape

MIXTRAL, LLAMA = "MixtralForCausalLM", "LlamaForCausalLM"
MODEL_TYPES = {MIXTRAL: "mixtral", LLAMA: "llama"}


def architecture(shape: TransformerShape) -> str:
    """Return the class of transformers that computes the same model."""
    return MIXTRAL if shape.num_experts else LLAMA


def config_json(shape: TransformerShape, seq_len: int, end_of_text: int) -> dict[str, Any]:
    """Return the config from which transformers and vLLM build the model.

    Args:
        shape: the shape of a model that these classes can express.
        seq_len: tokens of a training sequence: no later position was ever trained.
        end_of_text: the id that stands after every document, and so before every next one.
    """
    name = architecture(shape)
    common = {
        "architectures": [name],
        "model_type": MODEL_TYPES[name],
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "head_dim": shape.d_model // shape.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,  # transformers 4 and older vLLM
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},  # transformers 5
        "max_position_embeddings": seq_len,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": "float32",
    }
    if name == LLAMA:
        width = max(1, shape.top_k) * shape.d_expert
        return common | {"intermediate_size": width, "attention_bias": False, "mlp_bias": False}
    return common | {
        "intermediate_size": shape.d_expert,
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    }
