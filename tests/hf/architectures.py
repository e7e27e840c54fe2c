"""Tiny models with random weights of the architectures of transformers whose routers are known."""

import warnings

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from simbal.hf.routers import Rule, SparseMixer
from simbal.model.router import Groups

E, K = 8, 2
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "num_experts_per_tok": K, "shared_expert_intermediate_size": 16, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {  # attention of DeepSeek
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4,
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
GROUPED = {"n_group": 4, "topk_group": 2}
SOFTMAX, RENORMALIZED = Rule("softmax", renormalize=False), Rule("softmax", renormalize=True)
BY_BIAS = Rule("sigmoid", renormalize=True, biased=True)
V3 = Rule("sigmoid", renormalize=True, scale=2.5, groups=Groups(4, 2, "best two"), biased=True)
RULE = {  # of each architecture: its rule, and what its config needs beside `SIZES`
    "mixtral": (RENORMALIZED, {"num_local_experts": E}),
    "olmoe": (SOFTMAX, {"num_experts": E}),
    "flex_olmo": (SOFTMAX, {"num_experts": E}),
    "qwen2_moe": (SOFTMAX, {"num_experts": E}),
    "qwen3_moe": (RENORMALIZED, {"num_experts": E, "norm_topk_prob": True}),
    "deepseek_v2": (SOFTMAX, LATENT | {"n_routed_experts": E}),
    "deepseek_v3": (V3, LATENT | GROUPED | {"n_routed_experts": E, "routed_scaling_factor": 2.5}),
    "glm4_moe": (
        Rule("sigmoid", renormalize=True, groups=Groups(4, 2, "best two"), biased=True),
        GROUPED | {"n_routed_experts": E, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "ernie4_5_moe": (Rule("softmax", renormalize=True, biased=True), {"moe_num_experts": E, "moe_k": K}),
    "minimax_m2": (BY_BIAS, {"num_local_experts": E}),
    "gpt_oss": (RENORMALIZED, {"num_local_experts": E}),
    "granitemoe": (RENORMALIZED, {"num_local_experts": E}),
    "hunyuan_v1_moe": (RENORMALIZED, {"num_experts": E, "moe_topk": K}),
    "phimoe": (SparseMixer("softmax", renormalize=False, jitter=0.01), {"num_local_experts": E}),
}


def architecture(name: str, **changes: object) -> PreTrainedModel:
    """The same weights at each call, in evaluation mode."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = AutoConfig.for_model(name)
        sizes = {key: value for key, value in SIZES.items() if hasattr(known, key)}
        config = type(known)(**sizes | RULE[name][1] | changes)
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
