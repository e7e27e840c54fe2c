"""Each supported architecture computes and trains as in transformers; other models are refused."""

import json
import re
from dataclasses import replace
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from simbal import hf
from simbal.conformance import tiny_model
from simbal.errors import UserError
from simbal.hf.convert import (
    ARCHITECTURES,
    HEAD,
    LLAMA,
    MIXTRAL,
    OLMOE,
    QWEN3,
    QWEN3_MOE,
    Architecture,
    architecture_of,
    named_weights,
)
from simbal.model.head import head_loss

V, S = 32, 16
EXACT = {"atol": 1e-5, "rtol": 1e-5}
ALL = [pytest.param(each, id=each.name) for each in ARCHITECTURES]


def config_of(kind: Architecture, heads=4, kv_heads=2, head_dim=8, tied=False, **more):
    """Return a config of transformers. OLMoE needs head_dim = width / heads."""
    width = heads * (16 if head_dim == 8 else 8) if kind.any_head_dim else heads * head_dim
    keys = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12} if kind.sparse else {}
    keys |= {"head_dim": head_dim} if kind.any_head_dim else {}
    return AutoConfig.for_model(
        kind.model_type, vocab_size=V, hidden_size=width, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=S, tie_word_embeddings=tied,
        initializer_range=width**-0.5, bos_token_id=0, eos_token_id=0, pad_token_id=None, **keys | more,
    )  # fmt: skip


def build(config):
    """Return a transformers model with random weights, including the norms."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model.eval()


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, V, (3, S), generator=torch.Generator().manual_seed(seed))


def load(model, folder):
    model.save_pretrained(folder)
    return hf.from_pretrained(folder)


def logits(model) -> torch.Tensor:
    return model(tokens())[0] @ model.head_VD.T


@torch.no_grad()
@pytest.mark.parametrize("kind", ALL)
@settings(max_examples=6)
@given(
    kv_heads=st.sampled_from([1, 2, 4]), groups=st.sampled_from([1, 2, 3]), head_dim=st.sampled_from([8, 12, 16]),
    tied=st.booleans(), renormalize=st.booleans(), theta=st.sampled_from([1e2, 1e6]),
)  # fmt: skip
def test_logits_equal_those_of_transformers_for_any_heads(kind, kv_heads, groups, head_dim, tied, renormalize, theta):
    more = {"norm_topk_prob": renormalize} if kind.any_renormalize else {}
    rope = {"rope_type": "default", "rope_theta": theta}
    theirs = build(config_of(kind, kv_heads * groups, kv_heads, head_dim, tied, rope_parameters=rope, **more))
    with TemporaryDirectory() as folder:
        ours = load(theirs, folder)
    torch.testing.assert_close(logits(ours), theirs(tokens()).logits, **EXACT)
    assert ours.shape.kv_heads == kv_heads
    assert (ours.head_VD is ours.embedding.weight) == tied


@pytest.mark.parametrize("kind", ALL)
def test_training_follows_transformers(tmp_path, kind):
    """After three steps with the same batches, every weight has the same gradient."""
    theirs = build(config_of(kind, tied=kind.sparse))
    ours = load(theirs, tmp_path)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (ours, theirs)]
    for step in range(4):
        inputs_BS, targets_N = tokens(step)[:, :-1], tokens(step)[:, 1:].flatten()
        loss = head_loss(ours(inputs_BS)[0].flatten(0, 1), ours.head_VD, targets_N, 0.0).loss
        other = F.cross_entropy(theirs(inputs_BS).logits.flatten(0, 1), targets_N)
        torch.testing.assert_close(loss, other, **EXACT)
        for optimizer, each in zip(optimizers, (loss, other), strict=True):
            optimizer.zero_grad()
            each.backward()
            if step < 3:
                optimizer.step()
    for model in (ours, theirs):  # gradients take the names of the weights
        for parameter in model.parameters():
            parameter.data = parameter.grad
    expected = named_weights(load(theirs, tmp_path))
    for name, gradient in named_weights(ours).items():
        assert gradient.abs().max() > 0 or ".experts." in name, name  # an expert may get no token
        torch.testing.assert_close(gradient, expected[name], **EXACT)


@pytest.mark.parametrize(
    ("kind", "change", "part"),
    [
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        (OLMOE, {"head_dim": 6}, "head_dim=6"),
        (OLMOE, {"sliding_window": 4}, "sliding_window=4"),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, "mlp_only_layers=[0]"),
        (QWEN3_MOE, {"use_sliding_window": True, "sliding_window": 8}, "sliding_window=8"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=['sliding_attention']"),
        (LLAMA, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type=linear"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        (LLAMA, {"num_key_value_heads": 1}, "k_proj.weight has shape (16, 64), but config.json requires (8, 64)"),
        (LLAMA, {"num_hidden_layers": 1}, "model.layers.1."),
        (MIXTRAL, {"num_hidden_layers": 3}, "lacks the weight model.layers.2."),
        (MIXTRAL, {"model_type": "qwen2_moe"}, "model_type=qwen2_moe is not supported"),
    ],
)
def test_models_that_our_transformer_does_not_compute_are_refused(tmp_path, kind, change, part):
    build(config_of(kind)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as refused:
        hf.from_pretrained(tmp_path)
    assert part in str(refused.value)


def test_damaged_and_missing_files_are_named(tmp_path):
    build(config_of(MIXTRAL)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="model.safetensors cannot be read"):
        hf.from_pretrained(tmp_path)
    file.unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="has no model.safetensors .* save_pretrained"):
        hf.from_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="config.json cannot be read"):
        hf.from_pretrained(tmp_path)


@torch.no_grad()
def test_tied_embeddings_may_be_stored_twice(tmp_path):
    model = build(config_of(LLAMA, tied=True))
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights[HEAD] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(logits(hf.from_pretrained(tmp_path)), model(tokens()).logits, **EXACT)


@torch.no_grad()
def test_bf16_folders_with_several_files_are_loaded(tmp_path):
    build(config_of(MIXTRAL)).bfloat16().save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits(hf.from_pretrained(tmp_path)), theirs(tokens()).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"gating": "sqrtsoftplus"}, "router.gating=sqrtsoftplus: Mixtral uses softmax gating"),
        ({"router_scale": 1.5}, "router.scale=1.5: Mixtral does not scale the weights of the chosen experts"),
        ({"router_input": "embedding"}, "router.input=embedding: routers of Mixtral read hidden states"),
        ({"token_table": True}, "model.token_table=true: Mixtral has no learned vector per token id and layer"),
    ],
)
def test_export_refuses_a_model_whose_router_or_token_table_no_architecture_has(option, message):
    shape = tiny_model().shape
    assert architecture_of(shape) is MIXTRAL
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        architecture_of(replace(shape, **option))
