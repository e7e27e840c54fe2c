"""The size of a model that is counted is that of the model that is made."""

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from simbal.cost.parameters import count, parameters, weights_of
from simbal.model.init import initialise
from simbal.model.transformer import Transformer
from tests.cost.test_memory import shape_of

WAYS = st.fixed_dictionaries({
    "num_kv_heads": st.sampled_from([None, 1, 2, 4]), "head_dim": st.sampled_from([None, 6, 80]),
    "qk_norm": st.sampled_from(["none", "head", "projection"]), "tie_embeddings": st.booleans(), "bias": st.booleans(),
    "num_shared_experts": st.integers(0, 3),
})  # fmt: skip
PRESETS = ("bench", "tiny", "tiny_dense", "small", "dense_m", "moe_m", "moe_l")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_is_counted_once_with_its_size(preset):
    counted_as_made(replace(shape_of(preset), num_layers=3))


@given(preset=st.sampled_from(["tiny", "tiny_dense"]), way=WAYS)
def test_so_is_every_parameter_with_other_heads_norms_embeddings_and_shared_experts(preset, way):
    counted_as_made(shape_of(preset, **way))


def counted_as_made(shape):
    with torch.device("meta"):
        model = Transformer(shape, "reference" if shape.num_experts else None)
    counted = Counter({each.size: 0 for each in weights_of(shape)})
    for each in weights_of(shape):
        counted[each.size] += each.copies
    assert counted == Counter(tuple(parameter.shape) for parameter in model.parameters())
    assert count(weights_of(shape)) == sum(parameter.numel() for parameter in model.parameters())
    assert count(weights_of(shape), "router") == sum(router.weight_ED.numel() for router in model.routers)


@torch.no_grad()
@given(preset=st.sampled_from(["tiny", "tiny_dense"]), way=WAYS)
def test_flops_are_those_that_torch_counts_with_attention_to_every_position(preset, way):
    shape = shape_of(preset, **(way | {"num_layers": 2, "vocab_size": 61, "bias": False}))
    model = Transformer(shape, "reference" if shape.num_experts else None)
    initialise(model, 0, 0.02, "normal")
    B, S = 2, 7
    plain = patch("simbal.model.matmul.onednn_is_faster", lambda: False)  # operations that the counter knows
    with plain, sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.arange(B * S).view(B, S))[0] @ model.head_VD.T
    unseen = (2 * S - (S + 1)) * 2 * shape.num_layers * shape.num_heads * shape.head_width  # after a token, per token
    assert counter.get_total_flops() == B * S * (parameters(shape).forward_flops(S) + unseen)


def test_no_size_takes_time():
    largest = {"num_layers": 2**50, "d_model": 2**50, "num_experts": 2**50, "d_expert": 2**50, "vocab_size": 2**50}
    assert count(weights_of(shape_of("tiny", **largest))) > 3 * 2**200
