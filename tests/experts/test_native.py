"""The experts in C compute the same outputs and gradients as the reference, for any shape and routing."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from simbal.experts.backends import RoutingPlan, reference
from simbal.experts.native import native, unsupported
from tests.compiler import needs_compiler
from tests.experts.test_backends import assert_close, case, outputs

pytestmark = needs_compiler


@st.composite
def plans(draw):
    """Sizes (N, D, F, E, K) and the chosen experts (N, K) or, ragged, a plan that omits some slots."""
    E = draw(st.integers(1, 9))
    N, D, F, K = (draw(st.integers(1, most)) for most in (40, 70, 70, E))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits_NE = torch.randn(N, E, generator=g)
    popular = draw(st.integers(0, E - K))
    logits_NE[:, popular : popular + K] += draw(st.sampled_from([0.0, 40.0]))  # 40: all other experts are empty
    kept = torch.rand(N * K, generator=g) < draw(st.sampled_from([1.0, 0.6, 0.0]))
    return N, D, F, E, K, logits_NE.topk(K).indices, kept


def with_slots(plan, kept):
    """The plan without the slots that are not kept."""
    rows = kept[plan.order_R]
    ends_E = torch.cat([rows.new_zeros(1, dtype=torch.int64), rows.cumsum(0)])[plan.ends_E.long()].int()
    return RoutingPlan(plan.weights_NK, plan.order_R[rows], plan.inverse_R, ends_E)


def gradients(backend, leaves, experts_NK, kept, dy):
    x, p, w13, w2 = leaves
    y = backend(x, with_slots(RoutingPlan.build(experts_NK, p, len(w2)), kept), w13, w2)
    grads = torch.autograd.grad(y, leaves, dy, allow_unused=True)
    return [y.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]


@given(plans(), st.integers(1, 3))
@example((1, 1, 1, 1, 1, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.bool)), 1)
def test_native_equals_reference_for_any_shape_and_omitted_slots(plan, threads):
    N, D, F, E, K, experts_NK, kept = plan
    g = torch.Generator().manual_seed(N + D)
    shapes = (N, D), (N, K), (E, 2, F, D), (E, F, D), (N, D)
    leaves = [torch.randn(*shape, generator=g) for shape in shapes]
    dy = leaves.pop()
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = gradients(native, leaves, experts_NK, kept, dy)
    finally:
        torch.set_num_threads(before)
    for a, b in zip(got, gradients(reference, exact, experts_NK, kept, dy.double()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5 * (1 + b.abs().max().item()))


@pytest.mark.parametrize("routing", ["balanced", "skewed", "collapsed", "empty"])
def test_native_repeats_its_bits_with_any_number_of_threads(routing):
    leaves, experts_NK, dy = case(routing, N=300, D=48, width=20, dtype=torch.float32)
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 1, 2, 2):
            torch.set_num_threads(threads)
            runs.append(outputs("native", leaves, experts_NK, dy))
    finally:
        torch.set_num_threads(before)
    assert_close(runs[0], outputs("reference", leaves, experts_NK, dy), 1e-5)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


def test_native_accepts_an_expanded_gradient_and_strided_inputs():
    leaves, experts_NK, _ = case("balanced", dtype=torch.float32)
    leaves[0] = torch.randn(24, 32)[:, ::2].requires_grad_()
    leaves[2] = torch.randn(16, 8, 2, 5).permute(3, 2, 1, 0).requires_grad_()
    dy = torch.ones(()).expand(24, 16)
    assert_close(outputs("native", leaves, experts_NK, dy), outputs("reference", leaves, experts_NK, dy), 1e-5)


def test_a_nan_or_infinite_input_reaches_the_output_and_the_gradients():
    leaves, experts_NK, dy = case("balanced", dtype=torch.float32)
    leaves[0].data[3, 5] = torch.nan
    y, dx, *_ = outputs("native", leaves, experts_NK, dy)
    assert y[3].isnan().all()
    assert dx[3].isnan().all()
    assert not torch.cat([y[:3], y[4:], dx[:3], dx[4:]]).isnan().any()


def test_other_devices_and_dtypes_are_unsupported():
    assert "fp32 on a CPU" in unsupported(torch.device("cpu"), torch.bfloat16, 8, 8)
    assert "fp32 on a CPU" in unsupported(torch.device("cuda"), torch.float32, 8, 8)
