"""Every backend computes the same function, with the same gradients, as an independent loop over tokens."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from simbal.experts.backends import RoutingPlan
from simbal.experts.select import apply_experts

NAMES = ("y", "dx", "dp", "dw13", "dw2")
PLAIN = ("reference", "torch")  # the others need Triton's interpreter: test_interpreted.py


def case(routing: str, N=24, D=16, width=8, E=5, K=2, dtype=torch.float64):
    """Leaves (x, p, w13, w2), the chosen experts, and an output gradient."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(N, E, generator=g, dtype=torch.float64)
    if routing == "skewed":
        logits[:, E // 2] -= 40  # an expert without tokens in the middle
    if routing == "collapsed":
        logits[:, :K] += 40
    if routing == "empty":
        logits[:, [0, E // 2, E - 1]] -= 40
    p_NK, experts_NK = logits.softmax(-1).topk(K)
    shapes = (N, D), (E, 2, width, D), (E, width, D), (N, D)
    x, w13, w2, dy = (torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) / 2 for shape in shapes)
    p = p_NK if dtype == torch.float64 else p_NK.float()
    return [leaf.requires_grad_() for leaf in (x, p, w13, w2)], experts_NK, dy


def loop(x, experts_NK, p, w13, w2):
    """One token and one choice at a time."""
    rows = []
    for t in range(len(x)):
        terms = []
        for k, e in enumerate(experts_NK[t].tolist()):
            hidden = F.silu(w13[e, 0] @ x[t]) * (w13[e, 1] @ x[t])
            terms.append(p[t, k] * (hidden @ w2[e]))
        rows.append(sum(terms))
    return torch.stack(rows)


def outputs(backend, leaves, experts_NK, dy):
    """Output and gradients; `backend` None is the loop."""
    x, p, w13, w2 = leaves
    plan = RoutingPlan.build(experts_NK, p, len(w2))
    y = loop(x, experts_NK, p, w13, w2) if backend is None else apply_experts(backend, x, plan, w13, w2)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def assert_close(got, want, tolerance):
    for name, a, b in zip(NAMES, got, want, strict=True):
        error = (a.double() - b.double()).abs().max() / b.double().abs().max()
        assert error <= tolerance, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("routing", ["balanced", "skewed", "collapsed"])
@pytest.mark.parametrize(("E", "K"), [(5, 2), (5, 1), (4, 4)])
@pytest.mark.parametrize("backend", PLAIN)
def test_backend_equals_the_loop_in_float64(backend, routing, E, K):
    leaves, experts_NK, dy = case(routing, E=E, K=K)
    assert_close(outputs(backend, leaves, experts_NK, dy), outputs(None, leaves, experts_NK, dy), 1e-12)


@pytest.mark.parametrize("routing", ["balanced", "skewed", "collapsed"])
def test_grouped_equals_reference_in_fp32_and_repeats_its_bits(routing):
    leaves, experts_NK, dy = case(routing, dtype=torch.float32)
    first, second = (outputs("torch", leaves, experts_NK, dy) for _ in range(2))
    assert_close(first, outputs("reference", leaves, experts_NK, dy), 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", PLAIN)
def test_gradients_stay_fp32_under_bf16_autocast(backend):
    leaves, experts_NK, dy = case("skewed", dtype=torch.float32)
    want = outputs("reference", leaves, experts_NK, dy)
    with torch.autocast("cpu", torch.bfloat16):
        got = outputs(backend, leaves, experts_NK, dy)
    assert got[0].dtype is torch.bfloat16
    assert all(gradient.dtype is torch.float32 for gradient in got[1:])
    assert_close(got, want, 3e-2)


def test_grouped_accepts_an_expanded_gradient_and_a_strided_input():
    leaves, experts_NK, _ = case("balanced", dtype=torch.float32)
    leaves[0] = torch.randn(24, 32)[:, ::2].requires_grad_()
    dy = torch.ones(()).expand(24, 16)
    assert_close(outputs("torch", leaves, experts_NK, dy), outputs("reference", leaves, experts_NK, dy), 1e-5)


@given(
    st.integers(1, 6).flatmap(lambda e: st.tuples(st.just(e), st.lists(st.integers(0, e - 1), min_size=1, max_size=20)))
)
def test_plan_sorts_slots_by_expert_stably_and_counts_them(example):
    num_experts, choices = example
    plan = RoutingPlan.build(torch.tensor(choices)[:, None], torch.ones(len(choices), 1), num_experts)
    assert plan.order_R.tolist() == sorted(range(len(choices)), key=lambda slot: choices[slot])
    assert plan.order_R[plan.inverse_R].tolist() == list(range(len(choices)))
    assert plan.ends_E.tolist() == [sum(c <= e for c in choices) for e in range(num_experts)]
