"""Attention: grouped queries, head width, QK-norm, tied embeddings, document masks, and matrix products by oneDNN.

tests/hf/test_architectures.py compares these options with transformers.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from simbal.model import matmul
from simbal.model.attention import KeyValueCache, document_mask
from simbal.model.init import initialize
from simbal.model.transformer import Transformer
from simbal.training.optimizer import parameter_groups
from tests.conftest import spec_of
from tests.model.test_transformer import shape

END = 60
KEYS = st.fixed_dictionaries({
    "num_kv_heads": st.sampled_from([None, 1, 2, 4]), "head_dim": st.sampled_from([None, 2, 6]),
    "qk_norm": st.sampled_from(["none", "head", "projection"]), "tie_embeddings": st.booleans(),
    "num_experts": st.sampled_from([0, 6]), "document_end": st.sampled_from([None, END]),
})  # fmt: skip


@pytest.fixture(scope="module")
def optim(tmp_path_factory, cache_dir):
    return spec_of(tmp_path_factory.mktemp("outputs"), cache_dir).config.optim


def built(**keys) -> Transformer:
    model = Transformer(shape(**keys), "reference" if keys.get("num_experts", 6) else None)
    initialize(model, seed=0, std=0.3, router_init="normal")
    return model


@settings(max_examples=10)
@given(keys=KEYS)
def test_generation_with_a_cache_gives_the_states_of_the_full_sequence(keys):
    model = built(**keys)
    tokens_BS = torch.randint(0, END + 1, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        full_BSD, _ = model(tokens_BS)
        cache = KeyValueCache(model.shape.num_layers)
        pieces = [model(piece, None, cache)[0] for piece in tokens_BS.split([4, 1, 3, 1], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), full_BSD, atol=1e-5, rtol=1e-4)
    kept = cache.layers[0].kv_2BGSP
    assert kept is not None
    assert kept.shape == (2, 2, model.shape.kv_heads, 9, model.shape.head_width)  # key heads, not query heads


@settings(max_examples=10)
@given(keys=KEYS)
def test_every_parameter_is_trained_once_and_gains_do_not_decay(keys, optim):
    model = built(**keys)
    decayed, plain = (group["params"] for group in parameter_groups(model, optim))
    assert len({*map(id, [*decayed, *plain])}) == len(decayed) + len(plain) == len([*model.parameters()])
    gains = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    assert len(gains) == 5 + (0 if keys["qk_norm"] == "none" else 4)
    assert {*map(id, plain)} == {*map(id, gains)}


@pytest.mark.parametrize("qk_norm", ["head", "projection"])
def test_normed_queries_and_keys_do_not_depend_on_the_scale_of_their_projections(qk_norm):
    model = built(qk_norm=qk_norm, num_kv_heads=2, norm_eps=0.0)
    tokens_BS = torch.arange(24).view(2, 12)
    with torch.no_grad():
        before_BSD, _ = model(tokens_BS)
        for block in model.blocks:
            block.attention.qkv.weight[: 6 * 8] *= 5.0  # four query heads and two key heads, but no values
        torch.testing.assert_close(model(tokens_BS)[0], before_BSD, atol=1e-5, rtol=1e-5)
        for block in model.blocks:
            block.attention.q_norm.weight *= 5.0
        assert not torch.allclose(model(tokens_BS)[0], before_BSD, atol=1e-2)


def test_a_token_attends_to_its_own_document_whose_end_belongs_to_it():
    mask_SS = document_mask(torch.tensor([[1, 9, 9, 2, 3]]), document_end=9)[0, 0]
    assert mask_SS.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


@torch.no_grad()
def test_attention_does_not_cross_a_document_end():
    model, unmasked = built(document_end=END), built()
    tokens_BS = torch.randint(0, END, (2, 12), generator=torch.Generator().manual_seed(1))
    tokens_BS[0, 4] = tokens_BS[0, 5] = END  # the second document is empty
    hidden_BSD, _ = model(tokens_BS)
    changed_BS = tokens_BS.clone()
    changed_BS[0, :4] = (changed_BS[0, :4] + 1) % END
    torch.testing.assert_close(model(changed_BS)[0][0, 5:], hidden_BSD[0, 5:], atol=1e-6, rtol=0)
    assert not torch.allclose(unmasked(changed_BS)[0][0, 5:], unmasked(tokens_BS)[0][0, 5:])
    third_BSD, _ = model(tokens_BS[:1, 6:])  # positions are relative, so the position of a document does not matter
    torch.testing.assert_close(third_BSD[0], hidden_BSD[0, 6:], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(hidden_BSD[1], unmasked(tokens_BS)[0][1], atol=1e-6, rtol=1e-5)


@pytest.fixture(params=[True, False], ids=["onednn", "torch"])
def library(request, monkeypatch):
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch is built without oneDNN")
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: request.param)


@pytest.mark.parametrize("rows", [0, 1, 37])
def test_mm_multiplies_any_layout(library, rows):
    a, b = torch.randn(rows, 12), torch.randn(12, 20)
    for left in (a, a.T.contiguous().T):
        for right in (b, b.T.contiguous().T):
            torch.testing.assert_close(matmul.mm(left, right), a @ b)
    torch.testing.assert_close(matmul.mm(a.T, torch.ones(rows, 3)), a.T @ torch.ones(rows, 3))


@pytest.mark.parametrize("frozen", [False, True])
def test_linear_has_the_gradients_of_torch_also_for_strided_and_expanded_gradients(library, frozen):
    x_BSD, weight_JD = torch.randn(2, 5, 12, requires_grad=True), torch.randn(8, 12, requires_grad=not frozen)
    leaves = [x_BSD] if frozen else [x_BSD, weight_JD]
    for dy_BSJ in (torch.randn(8, 5, 2).permute(2, 1, 0), torch.ones(()).expand(2, 5, 8)):
        ours_BSJ, expected_BSJ = matmul.linear(x_BSD, weight_JD), F.linear(x_BSD, weight_JD)
        torch.testing.assert_close(ours_BSJ, expected_BSJ)
        gradients = [torch.autograd.grad(y_BSJ, leaves, dy_BSJ) for y_BSJ in (ours_BSJ, expected_BSJ)]
        torch.testing.assert_close(*gradients)


def test_linear_has_the_second_derivatives_of_torch(library):
    x_ND, weight_JD = torch.randn(5, 12, requires_grad=True), torch.randn(8, 12, requires_grad=True)
    found = []
    for linear in (matmul.linear, F.linear):
        first = torch.autograd.grad(linear(x_ND, weight_JD).tanh().sum(), (x_ND, weight_JD), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), (x_ND, weight_JD)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_and_autocast_use_torch(monkeypatch, dtype):
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: True)
    x_ND, weight_JD = torch.randn(4, 12), torch.randn(8, 12)
    assert matmul.linear(x_ND.to(dtype), weight_JD.to(dtype)).dtype == dtype
    assert matmul.mm(x_ND.to(dtype), weight_JD.to(dtype).T).dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert matmul.linear(x_ND, weight_JD).dtype == torch.bfloat16
