"""Shared heads, their width, QK-norm and tied embeddings: the paper's values change nothing, and others work.

That they compute what transformers computes is said in tests/hub/test_architectures.py.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.config.schema import OptimConfig
from simbal.model.attention import KeyValueCache
from simbal.model.init import initialise
from simbal.model.transformer import Transformer
from simbal.training.optimizer import parameter_groups
from tests.model.test_transformer import shape

END = 60
OPTIM = OptimConfig(
    lr=1e-3,
    weight_decay=0.1,
    betas=[0.9, 0.95],
    eps=1e-8,
    decay_router=True,
    warmup_steps=1,
    z_loss_coef=0,
    grad_clip=0,
    aux_layer_reduce="sum",
)
KEYS = st.fixed_dictionaries({
    "num_kv_heads": st.sampled_from([None, 1, 2, 4]), "head_dim": st.sampled_from([None, 2, 6]),
    "qk_norm": st.sampled_from(["none", "head", "projection"]), "tie_embeddings": st.booleans(),
    "num_experts": st.sampled_from([0, 6]), "document_end": st.sampled_from([None, END]),
})  # fmt: skip


def built(**keys) -> Transformer:
    model = Transformer(shape(**keys), "reference" if keys.get("num_experts", 6) else None)
    initialise(model, seed=0, std=0.3, router_init="normal")
    return model


def test_the_papers_values_give_the_same_names_sizes_and_initial_bits_whether_they_are_given_or_left_out():
    plain = built().state_dict()
    given = built(num_kv_heads=4, head_dim=8, qk_norm="none", tie_embeddings=False).state_dict()
    assert [*plain] == [*given]
    assert all(torch.equal(tensor, given[name]) for name, tensor in plain.items())
    assert {name: tuple(tensor.shape) for name, tensor in plain.items() if ".0.attention." in name} == {
        "blocks.0.attention.qkv.weight": (96, 32), "blocks.0.attention.out.weight": (32, 32),
    }  # fmt: skip


@given(keys=KEYS)
def test_with_a_cache_the_states_are_those_of_the_whole_sequence_for_any_heads(keys):
    model = built(**keys)
    tokens_BS = torch.randint(0, END + 1, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole_BSD, _ = model(tokens_BS)
        cache = KeyValueCache(model.shape.num_layers)
        pieces = [model(piece, None, cache)[0] for piece in tokens_BS.split([4, 1, 3, 1], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole_BSD, atol=1e-5, rtol=1e-4)
    kept = cache.layers[0].kv_2BGSP
    assert kept is not None
    assert kept.shape == (2, 2, model.shape.kv_heads, 9, model.shape.head_width)  # not one for each head of queries


@given(keys=KEYS)
def test_every_parameter_is_trained_once_and_gains_do_not_decay(keys):
    model = built(**keys)
    decayed, plain = (group["params"] for group in parameter_groups(model, OPTIM))
    assert len({*map(id, [*decayed, *plain])}) == len(decayed) + len(plain) == len([*model.parameters()])
    gains = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    assert len(gains) == 5 + (0 if keys["qk_norm"] == "none" else 4)
    assert {*map(id, plain)} == {*map(id, gains)}
    assert all(torch.equal(gain, torch.ones_like(gain)) for gain in gains)


@pytest.mark.parametrize("qk_norm", ["head", "projection"])
def test_normed_queries_and_keys_do_not_see_the_scale_of_their_projections(qk_norm):
    model = built(qk_norm=qk_norm, num_kv_heads=2, norm_eps=0.0)
    tokens_BS = torch.arange(24).view(2, 12)
    with torch.no_grad():
        before_BSD, _ = model(tokens_BS)
        for block in model.blocks:
            block.attention.qkv.weight[: 6 * 8] *= 5.0  # four heads of queries and two of keys, but not the values
        after_BSD, _ = model(tokens_BS)
        torch.testing.assert_close(after_BSD, before_BSD, atol=1e-5, rtol=1e-5)
        for block in model.blocks:
            block.attention.q_norm.weight *= 5.0
        assert not torch.allclose(model(tokens_BS)[0], before_BSD, atol=1e-2)


def test_gains_in_bf16_normalise_in_fp32():
    model = built(qk_norm="head").bfloat16()
    tokens_BS = torch.arange(24).view(2, 12)
    attention = model.blocks[0].attention
    q_norm = attention.q_norm
    seen = []
    attention.out.weight.register_hook(lambda gradient: seen.append(gradient.dtype))
    model(tokens_BS)[0].float().sum().backward()
    assert seen == [torch.bfloat16]
    assert q_norm.weight.grad.dtype == torch.bfloat16
    assert q_norm.weight.grad.abs().max() > 0
