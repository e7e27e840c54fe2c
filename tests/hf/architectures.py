"""Tiny models with random weights of the transformers architectures in the guide, and batches for them."""

import warnings
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from simbal.hf.routers import BIAS_NAMES, Rule, SparseMixer
from simbal.model.router import Groups

B, S, V, E, K = 3, 8, 64, 8, 2
SIZES = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 3,
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
V3 = Rule("sigmoid", renormalize=True, scale=2.5, groups=Groups(4, 2, "best two"), biased=True)
GLM = Rule("sigmoid", renormalize=True, groups=Groups(4, 2, "best two"), biased=True)
RULE: dict[str, tuple[Rule, Mapping[str, object]]] = {  # rule of each architecture, and config keys besides `SIZES`
    "mixtral": (RENORMALIZED, {"num_local_experts": E}),
    "olmoe": (SOFTMAX, {"num_experts": E}),
    "flex_olmo": (SOFTMAX, {"num_experts": E}),
    "qwen2_moe": (SOFTMAX, {"num_experts": E}),
    "qwen3_moe": (RENORMALIZED, {"num_experts": E, "norm_topk_prob": True}),
    "deepseek_v2": (SOFTMAX, LATENT | {"n_routed_experts": E}),
    "deepseek_v3": (V3, LATENT | GROUPED | {"n_routed_experts": E, "routed_scaling_factor": 2.5}),
    "glm4_moe": (GLM, GROUPED | {"n_routed_experts": E, "first_k_dense_replace": 1, "n_shared_experts": 1}),
    "ernie4_5_moe": (Rule("softmax", renormalize=True, biased=True), {"moe_num_experts": E, "moe_k": K}),
    "minimax_m2": (Rule("sigmoid", renormalize=True, biased=True), {"num_local_experts": E}),
    "gpt_oss": (RENORMALIZED, {"num_local_experts": E}),
    "granitemoe": (RENORMALIZED, {"num_local_experts": E}),
    "hunyuan_v1_moe": (RENORMALIZED, {"num_experts": E, "moe_topk": K}),
    "afmoe": (
        Rule("sigmoid", renormalize=True, scale=2.0, biased=True),
        {"num_experts": E, "num_dense_layers": 1, "route_scale": 2.0, "layer_types": ["full_attention"] * 3},
    ),
    "kimi_linear": (
        replace(V3, scale=2.446),
        LATENT | {
            "num_experts": E, "num_experts_per_token": K, "num_expert_group": 4, "topk_group": 2, "linear_head_dim": 8,
            "linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "nemotron_h": (
        GLM,
        GROUPED | {
            "n_routed_experts": E, "layers_block_type": ["full_attention", "moe", "linear_attention", "moe"],
            "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "longcat_flash": (
        Rule("softmax", renormalize=False, scale=6.0, biased=True),
        LATENT | {
            "n_routed_experts": E - 2, "zero_expert_num": 2, "expert_ffn_hidden_size": 16, "moe_topk": K,
            "num_layers": 1, "num_hidden_layers": 2, "ffn_hidden_size": 32,
        },
    ),
    "glm_moe_dsa": (V3, LATENT | GROUPED | {"n_routed_experts": E, "index_n_heads": 2, "index_head_dim": 8}),
    "lfm2_moe": (
        Rule("sigmoid", renormalize=True, biased=True),
        {"num_experts": E, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    "deepseek_v4": (  # the first layer chooses experts by token id
        Rule("sqrtsoftplus", renormalize=True, scale=1.5, biased=True),
        {
            "n_routed_experts": E, "mlp_layer_types": ["hash_moe", "moe", "moe"], "num_key_value_heads": 1,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
            "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "qk_rope_head_dim": 4, "index_head_dim": 8,
            "index_n_heads": 2, "hc_mult": 2,
        },
    ),
    "phimoe": (SparseMixer("softmax", renormalize=False, jitter=0.01), {"num_local_experts": E}),
}  # fmt: skip
EXCEPTIONS: dict[str, Mapping[str, object]] = {  # config keys of architectures that the guide does not list
    "inkling_text": {"n_routed_experts": E, "n_shared_experts": 1, "num_hidden_layers": 1},
}  # fmt: skip
SIMILAR = (
    "flex_olmo",
    "qwen2_moe",
    "deepseek_v2",
    "glm4_moe",
    "granitemoe",
    "hunyuan_v1_moe",
    "afmoe",
    "kimi_linear",
    "nemotron_h",
    "glm_moe_dsa",
    "lfm2_moe",
    "deepseek_v4",
)  # to another one
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SIMILAR else name for name in RULE]
BIASED = [name for name, (rule, _) in RULE.items() if rule.biased]
HOSTS = ("mixtral", "olmoe")  # with and without renormalized weights
GROUPS_WITHOUT_BIAS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1}  # of deepseek_v2


def architecture(name: str, **changes: object) -> PreTrainedModel:
    """Return a model in evaluation mode, with the same weights at each call."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = AutoConfig.for_model(name)
        sizes = {key: value for key, value in SIZES.items() if hasattr(known, key)}
        own = RULE[name][1] if name in RULE else EXCEPTIONS[name]
        config = type(known)(**sizes | own | changes)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2 and not parameter.any():  # AFMoE's routers start at 0
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def host(name: str = "mixtral", **changes: object) -> PreTrainedModel:
    """Return a model in training mode."""
    return architecture(name, **changes).train()


def batch(seed: int = 0, sequences: int = B) -> dict[str, Tensor]:
    tokens_BS = torch.randint(V, (sequences, S), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens_BS, "labels": tokens_BS}


def padded(seed: int = 0) -> dict[str, Tensor]:
    """Return sequences of 8, 5 and 3 tokens."""
    inputs = batch(seed)
    mask_BS = torch.arange(S) < torch.tensor([8, 5, 3])[:, None]
    return {**inputs, "attention_mask": mask_BS.long(), "labels": inputs["labels"].masked_fill(~mask_BS, -100)}


def router_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if name.endswith("mlp.gate.weight")}


def biases(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith(BIAS_NAMES)}


def record_experts(model: nn.Module) -> list[tuple[Tensor, ...]]:
    """Return a list to which the arguments of every call of a layer's experts are appended."""
    calls: list[tuple[Tensor, ...]] = []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda module, args: calls.append(args))
    return calls
