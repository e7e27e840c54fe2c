"""The model has the paper's sizes and computes what transformers' Mixtral and Llama compute."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from simbal.cost import count_parameters
from simbal.model.init import initialize
from simbal.model.transformer import Transformer, TransformerShape

MODELS = Path(__file__).parents[2] / "conf" / "model"
CL100K = 100_277


def preset(name: str, vocab_size: int = CL100K) -> TransformerShape:
    numbers = yaml.safe_load((MODELS / f"{name}.yaml").read_text())
    del numbers["init_std"], numbers["kernels"]
    return TransformerShape(vocab_size=vocab_size, gating="softmax", renormalize=True, **numbers)


@pytest.mark.parametrize(
    ("name", "total", "active", "experts", "router", "with_bias"),
    [
        ("dense_m", 229_536_000, 229_536_000, 56_623_104, 0, 229_591_296),  # the paper prints 230M
        ("moe_m", 626_094_336, 229_732_608, 452_984_832, 196_608, 626_684_160),  # 627M, 230M active
        ("dense_l", 761_074_176, 761_074_176, 339_738_624, 0, 761_240_064),  # 761M
        ("moe_l", 3_139_834_368, 761_664_000, 2_717_908_992, 589_824, 3_141_603_840),  # 3142M, 762M active
    ],
)
def test_the_papers_presets_have_its_parameter_counts(name, total, active, experts, router, with_bias):
    with torch.device("meta"):
        model = Transformer(preset(name))
        biased = Transformer(replace(model.shape, bias=True), "reference" if model.shape.num_experts else None)
    assert count_parameters(biased)["total"] == sum(p.numel() for p in biased.parameters()) == with_bias
    counts = count_parameters(model)
    assert counts["total"] == sum(parameter.numel() for parameter in model.parameters())
    assert counts["router"] == sum(router.weight_ED.numel() for router in model.routers)
    assert counts["embedding"] == CL100K * model.shape.d_model == model.head_VD.numel()
    assert (counts["total"], counts["active"], counts["experts"], counts["router"]) == (total, active, experts, router)


def shape(**changes) -> TransformerShape:
    plain = TransformerShape(
        vocab_size=61, num_layers=2, d_model=32, num_heads=4, d_expert=24, num_experts=6, top_k=2, rope_theta=1e4,
        norm_eps=1e-5, gating="softmax", renormalize=True,
    )  # fmt: skip
    return replace(plain, **changes)


def copy_attention(ours, theirs) -> None:
    projections = (theirs.self_attn.q_proj, theirs.self_attn.k_proj, theirs.self_attn.v_proj)
    for weight, projection in zip(ours.attention.qkv.weight.chunk(3), projections, strict=True):
        projection.weight.copy_(weight)
    theirs.self_attn.o_proj.weight.copy_(ours.attention.out.weight)


def common(config: TransformerShape) -> dict:
    return {
        "vocab_size": config.vocab_size, "hidden_size": config.d_model, "intermediate_size": config.d_expert,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads, "rms_norm_eps": config.norm_eps, "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"}, "attn_implementation": "eager",
    }  # fmt: skip


def assert_same_logits(ours: Transformer, theirs) -> None:
    theirs.model.embed_tokens.weight.copy_(ours.embedding.weight)
    theirs.lm_head.weight.copy_(ours.head_VD)
    tokens_BS = torch.randint(0, ours.shape.vocab_size, (2, 17), generator=torch.Generator().manual_seed(0))
    hidden_BSD, _ = ours(tokens_BS)
    torch.testing.assert_close(hidden_BSD @ ours.head_VD.T, theirs(tokens_BS).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_moe_logits_equal_mixtral_in_transformers(backend):
    ours = Transformer(shape(), backend)
    initialize(ours, seed=0, std=0.3, router_init="normal")
    theirs = MixtralForCausalLM(
        MixtralConfig(**common(ours.shape), num_local_experts=6, num_experts_per_tok=2, sliding_window=None)
    ).eval()
    for mine, layer in zip(ours.blocks, theirs.model.layers, strict=True):
        copy_attention(mine, layer)
        layer.mlp.gate.weight.copy_(mine.feed_forward.router.weight_ED)
        layer.mlp.experts.gate_up_proj.copy_(mine.feed_forward.w13_E2FD.flatten(1, 2))
        layer.mlp.experts.down_proj.copy_(mine.feed_forward.w2_EFD.transpose(1, 2))
    assert_same_logits(ours, theirs)


@torch.no_grad()
def test_dense_logits_equal_llama_in_transformers():
    ours = Transformer(shape(num_experts=0, top_k=0), None)
    initialize(ours, seed=0, std=0.3, router_init="normal")
    theirs = LlamaForCausalLM(LlamaConfig(**common(ours.shape))).eval()
    for mine, layer in zip(ours.blocks, theirs.model.layers, strict=True):
        copy_attention(mine, layer)
        layer.mlp.gate_proj.weight.copy_(mine.feed_forward.w13_2FD[0])
        layer.mlp.up_proj.weight.copy_(mine.feed_forward.w13_2FD[1])
        layer.mlp.down_proj.weight.copy_(mine.feed_forward.w2_FD.T)
    assert_same_logits(ours, theirs)


@torch.no_grad()
def test_a_later_token_never_changes_an_earlier_state():
    model = Transformer(shape())
    initialize(model, seed=0, std=0.3, router_init="orthogonal")
    tokens_BS = torch.randint(0, 61, (1, 12), generator=torch.Generator().manual_seed(1))
    changed_BS = tokens_BS.clone()
    changed_BS[0, 8:] = (changed_BS[0, 8:] + 1) % 61
    (before, routed), (after, rerouted) = model(tokens_BS), model(changed_BS)
    torch.testing.assert_close(before[:, :8], after[:, :8], atol=1e-6, rtol=0)
    for first, second in zip(routed, rerouted, strict=True):
        assert torch.equal(first.topk_experts_NK[:8], second.topk_experts_NK[:8])


def test_router_init_changes_only_routers_and_the_seed_changes_every_matrix():
    def weights(seed: int, router_init: str) -> dict:
        model = Transformer(shape())
        initialize(model, seed, 0.02, router_init)
        return {name: parameter for name, parameter in model.named_parameters() if parameter.ndim > 1}

    normal, orthogonal, other = weights(0, "normal"), weights(0, "orthogonal"), weights(1, "normal")
    for name in normal:
        assert torch.equal(normal[name], orthogonal[name]) == ("router" not in name), name
        assert not torch.equal(normal[name], other[name]), name
