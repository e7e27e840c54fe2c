"""Tiny models of Hugging Face transformers with MoE layers, and something to feed them."""

import warnings
from collections.abc import Callable

import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

L, B, S, D, E, K, V = 2, 3, 8, 16, 4, 2, 32
SIZES = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": 16, "num_hidden_layers": L, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": K, "initializer_range": 0.3,
}  # fmt: skip
EXPERTS = {"num_experts": E, "moe_intermediate_size": 16}


def mixtral(**changes) -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SIZES | {"num_local_experts": E} | changes))


def olmoe(**changes) -> PreTrainedModel:
    return OlmoeForCausalLM(OlmoeConfig(**SIZES | {"num_experts": E} | changes))


def qwen2_moe(**changes) -> PreTrainedModel:
    """Layer 1 of 3 is dense."""
    sizes = SIZES | EXPERTS | {"num_hidden_layers": 3, "mlp_only_layers": [1], "shared_expert_intermediate_size": 16}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes | changes))


def qwen3_moe(**changes) -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | EXPERTS | {"head_dim": 8, "norm_topk_prob": True} | changes))


HOSTS = {"mixtral": mixtral, "olmoe": olmoe, "qwen2_moe": qwen2_moe, "qwen3_moe": qwen3_moe}


def host(make: Callable[..., PreTrainedModel] = mixtral, **changes) -> PreTrainedModel:
    """The same weights at each call, in training mode; routers that load their experts unevenly."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(**changes).train()


def router_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in model.named_parameters() if name.endswith("mlp.gate.weight")}


def batch(seed: int = 0, sequences: int = B) -> dict[str, torch.Tensor]:
    tokens_BS = torch.randint(V, (sequences, S), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens_BS, "labels": tokens_BS}


def padded(seed: int = 0) -> dict[str, torch.Tensor]:
    """Sequences of 8, 5 and 3 tokens."""
    inputs = batch(seed)
    mask_BS = torch.arange(S) < torch.tensor([8, 5, 3])[:, None]
    return {**inputs, "attention_mask": mask_BS.long(), "labels": inputs["labels"].masked_fill(~mask_BS, -100)}
