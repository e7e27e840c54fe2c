"""Attention and head in C compute the same outputs and gradients as torch's operators."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.errors import UserError
from simbal.experts.select import select_backend
from simbal.model.attention import Attention, KeyValueCache, rotary_angles
from simbal.model.head import head_loss
from simbal.model.native import attention, select_kernels
from simbal.native import library
from tests.compiler import needs_compiler

CPU, FP32 = torch.device("cpu"), torch.float32
pytestmark = needs_compiler


def attentions(heads=4, kv_heads=4, width=8, qk_norm="none"):
    """The same attention by torch in float64 and by the kernels in fp32."""
    built = []
    for kernels in ("torch", "native"):
        torch.manual_seed(0)
        built.append(Attention(24, heads, kv_heads, width, qk_norm, 1e-5, kernels))
    return built[0].double(), built[1]


def with_gradients(module, x_BSD, dy_BSD, rotation_2SP):
    x_BSD = x_BSD.clone().requires_grad_()
    y_BSD = module(x_BSD, rotation_2SP)
    return [y_BSD.detach(), *torch.autograd.grad(y_BSD, [x_BSD, *module.parameters()], dy_BSD)]


@given(
    st.integers(1, 3), st.integers(1, 100), st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(1, 2)
)
def test_native_attention_equals_torch_for_any_shape(B, S, kv_heads, queries_per_key, half_width, threads):
    exact, native = attentions(kv_heads * queries_per_key, kv_heads, 2 * half_width)
    g = torch.Generator().manual_seed(S)
    x_BSD, dy_BSD = (torch.randn(B, S, 24, generator=g) for _ in range(2))
    rotation_2SP = rotary_angles(S, 2 * half_width, 1e4, CPU)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = with_gradients(native, x_BSD, dy_BSD, rotation_2SP)
    finally:
        torch.set_num_threads(before)
    want = with_gradients(exact, x_BSD.double(), dy_BSD.double(), rotation_2SP.double())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5 * (1 + b.abs().max().item()))


def test_native_attention_repeats_its_bits_with_any_number_of_threads_and_strides():
    g = torch.Generator().manual_seed(0)
    qkv_BSQ, dy_BSD = torch.randn(2, 70, 48, generator=g), torch.randn(2, 32, 70, generator=g).transpose(1, 2)
    rotation_2SP = rotary_angles(70, 8, 1e4, CPU)
    before, runs = torch.get_num_threads(), []
    try:
        for threads, layout in ((1, qkv_BSQ), (1, qkv_BSQ), (2, qkv_BSQ.transpose(0, 1).contiguous().transpose(0, 1))):
            torch.set_num_threads(threads)
            leaf = layout.detach().requires_grad_()
            y_BSD = attention(leaf, rotation_2SP, 4, 8)
            runs.append([y_BSD.detach(), *torch.autograd.grad(y_BSD, leaf, dy_BSD)])
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


def test_large_scores_do_not_overflow_and_a_nan_reaches_later_tokens():
    exact, native = attentions()
    rotation_2SP = rotary_angles(20, 8, 1e4, CPU)
    x_BSD = 1e3 * torch.randn(1, 20, 24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        native(x_BSD, rotation_2SP), exact(x_BSD.double(), rotation_2SP.double()).float(), rtol=1e-4, atol=1e-3
    )
    x_BSD[0, 7] = torch.nan
    y_BSD = native(x_BSD, rotation_2SP)
    assert y_BSD[0, 7:].isnan().all()


@pytest.mark.parametrize("case", ["mask", "cache", "qk_norm", "float64", "autocast"])
def test_torch_computes_what_the_kernels_do_not_support(case):
    _, native = attentions(qk_norm="head" if case == "qk_norm" else "none")
    x_BSD, rotation_2SP = torch.randn(1, 6, 24), rotary_angles(6, 8, 1e4, CPU)
    visible_B1SS = torch.ones(6, 6, dtype=torch.bool).tril()[None, None] if case == "mask" else None
    past = KeyValueCache(1).layers[0] if case == "cache" else None
    if case == "float64":
        native, x_BSD, rotation_2SP = native.double(), x_BSD.double(), rotation_2SP.double()
    with (
        mock.patch.object(library, "call", side_effect=AssertionError),
        torch.autocast("cpu", enabled=case == "autocast"),
    ):
        native(x_BSD, rotation_2SP, visible_B1SS, past)


@given(st.integers(1, 40), st.integers(1, 90), st.sampled_from([0.0, 0.1]), st.integers(1, 2))
def test_native_head_equals_torch_for_any_vocabulary(N, V, z_coef, threads):
    g = torch.Generator().manual_seed(N)
    x_ND, weight_VD = torch.randn(N, 8, generator=g), 3 * torch.randn(V, 8, generator=g)
    targets_N = torch.randint(V, (2 * N,), generator=g)[::2]

    def results(dtype, kernels):
        leaves = [leaf.to(dtype).requires_grad_() for leaf in (x_ND, weight_VD)]
        head = head_loss(*leaves, targets_N, z_coef, kernels)
        return [head.loss.detach(), head.nll_N, *torch.autograd.grad(head.loss / 4, leaves)]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = results(FP32, "native")
    finally:
        torch.set_num_threads(before)
    for a, b in zip(got, results(torch.float64, "torch"), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        validation = head_loss(x_ND, weight_VD, targets_N, z_coef, "native")
    torch.testing.assert_close(validation.nll_N, got[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [-1, 11])
def test_a_target_outside_the_vocabulary_is_an_error(wrong):
    with pytest.raises(RuntimeError, match="not in the vocabulary"):
        head_loss(torch.randn(3, 4), torch.randn(11, 4), torch.tensor([0, wrong, 1]), 0.0, "native")


def test_a_nan_logit_makes_the_loss_nan():
    x_ND = torch.randn(3, 4)
    x_ND[1, 2] = torch.nan
    nll_N = head_loss(x_ND, torch.randn(11, 4), torch.tensor([0, 5, 1]), 0.0, "native").nll_N
    assert nll_N.isnan().tolist() == [False, True, False]


def test_auto_takes_native_in_fp32_on_a_cpu_and_torch_elsewhere():
    assert select_kernels("auto", CPU, FP32, compiled=False).name == "native"
    for device, dtype, compiled in (
        (CPU, torch.bfloat16, False),
        (torch.device("cuda"), FP32, False),
        (CPU, FP32, True),
    ):
        choice = select_kernels("auto", device, dtype, compiled)
        assert choice.name == "torch"
        assert "native cannot run here" in choice.reason
        with pytest.raises(UserError, match=r"model.kernels=native cannot run here"):
            select_kernels("native", device, dtype, compiled)
    assert select_kernels("torch", CPU, FP32, compiled=False).name == "torch"


def test_auto_takes_native_only_with_vectors_that_were_measured(monkeypatch):
    monkeypatch.setattr(library, "vector_width", lambda: 4)
    for choice in (select_kernels("auto", CPU, FP32, compiled=False), select_backend("auto", CPU, FP32, 32, 32)):
        assert choice.name == "torch"
        assert "native was not measured with vectors of 4 floats" in choice.reason
    assert select_kernels("native", CPU, FP32, compiled=False).name == "native"
