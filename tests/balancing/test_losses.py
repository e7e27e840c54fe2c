"""Losses equal values worked out by hand, and their gradients the closed forms of the paper."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simbal.balancing.composition import Composition
from simbal.balancing.lbl import LoadBalancingLoss, load_balancing_loss
from simbal.balancing.none import NoBalancing
from simbal.balancing.simbal import SimBal, orthogonality_loss
from simbal.errors import UserError
from simbal.model.router import Routing, count, gate

PROBS_BSE = torch.tensor(
    [[[0.4, 0.3, 0.2, 0.1], [0.5, 0.15, 0.3, 0.05]], [[0.1, 0.2, 0.3, 0.4], [0.3, 0.4, 0.1, 0.2]]]
).double()
WEIGHT_ED = torch.tensor([[1, 0.5, 0], [0, 1, -0.5]])


def routing_of(logits_NE, num_sequences, K=2, gating="softmax") -> Routing:
    experts_NK = logits_NE.topk(K).indices
    probs_NE = gate(logits_NE, gating)
    weights_NK = probs_NE.gather(1, experts_NK)
    counts_E = count(experts_NK, logits_NE.shape[1])
    return Routing(logits_NE, probs_NE, experts_NK, weights_NK, counts_E, WEIGHT_ED, num_sequences, gating)


def example():
    logits_NE = PROBS_BSE.flatten(0, 1).log().requires_grad_()
    return logits_NE, routing_of(logits_NE, num_sequences=2)


def test_load_balancing_loss_is_nineteen_eighths_on_the_example():
    logits_NE, routing = example()
    assert routing.tokens_per_expert_E.tolist() == [3, 2, 2, 1]
    loss = load_balancing_loss(routing)
    assert loss.item() == pytest.approx(19 / 8)
    (gradient_NE,) = torch.autograd.grad(loss, logits_NE)
    assert gradient_NE[0].tolist() == pytest.approx([0.14, -0.045, -0.03, -0.065])


def test_one_sequence_of_all_tokens_gives_the_batchwise_value():
    _, routing = example()
    assert load_balancing_loss(replace(routing, num_sequences=1)).item() == pytest.approx(171 / 80)


def test_the_uniform_value_of_the_load_balancing_loss_is_k_but_no_lower_bound():
    uniform = routing_of(torch.zeros(8, 4), 1, K=4)
    assert load_balancing_loss(uniform).item() == pytest.approx(4)
    p_NE = torch.tensor([[0.51, 0.49], [0.51, 0.49], [0.01, 0.99]]).double()
    assert load_balancing_loss(routing_of(p_NE.log(), 1, K=1)).item() == pytest.approx(403 / 450)


@settings(max_examples=30)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(2, 5), st.sampled_from(["softmax", "sigmoid"]), st.data())
def test_load_balancing_loss_equals_loops_over_its_definition(B, S, E, gating, data):
    K = data.draw(st.integers(1, E))
    seed = data.draw(st.integers(0, 1000))
    logits_NE = torch.randn(B * S, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    routing = routing_of(logits_NE, B, K, gating)
    total = 0.0
    for b in range(B):
        for i in range(E):
            rows = range(b * S, (b + 1) * S)
            f = sum(i in routing.topk_experts_NK[t].tolist() for t in rows) / S
            p = sum((routing.probs_NE[t, i] / routing.probs_NE[t].sum()).item() for t in rows) / S
            total += E * f * p / B
    assert load_balancing_loss(routing).item() == pytest.approx(total)


def test_simbal_is_the_entrywise_sum_and_its_gradient_two_s_w():
    weight_ED = WEIGHT_ED.clone().requires_grad_()
    loss = orthogonality_loss(weight_ED)
    assert loss.item() == pytest.approx(1.5)
    (gradient_ED,) = torch.autograd.grad(loss, weight_ED)
    assert gradient_ED.tolist() == [[2, 3, -1], [2, 3, -1]]


@pytest.mark.parametrize(("width", "start"), [(768, 31.0), (1536, 24.8)])
def test_simbal_from_a_normal_start_has_the_size_known_for_the_papers_routers(width, start):
    weight_ED = 0.02 * torch.randn(32, width, generator=torch.Generator().manual_seed(0))
    assert orthogonality_loss(weight_ED).item() == pytest.approx(start, rel=0.02)


def test_simbal_vanishes_on_orthonormal_rows_in_fp32_and_acts_less_in_bf16():
    rows_ED = torch.linalg.qr(torch.randn(768, 32, generator=torch.Generator().manual_seed(0))).Q.T
    assert orthogonality_loss(rows_ED).item() < 1e-3
    near_ED = (rows_ED + 1e-5).requires_grad_()
    exact, rounded = (
        torch.autograd.grad(orthogonality_loss(near_ED, dtype), near_ED)[0] for dtype in (torch.float32, torch.bfloat16)
    )
    assert rounded.abs().sum() < exact.abs().sum()


@pytest.mark.parametrize("build", [LoadBalancingLoss, partial(SimBal, gram_dtype="fp32")])
def test_a_strategy_is_linear_in_its_coefficient(build):
    _, routing = example()
    one, three = build(1.0).loss(routing), build(3.0).loss(routing)
    torch.testing.assert_close(three, 3 * one)
    assert build(0).loss(routing) == 0


def test_layers_stay_apart_although_their_imbalances_would_cancel():
    _, routing = example()
    mirrored = routing_of(routing.logits_NE.flip(1), 2)
    losses_L = Composition({"lbl": LoadBalancingLoss(1.0)}).losses([routing, mirrored])["lbl"]
    assert losses_L.tolist() == pytest.approx([19 / 8, 19 / 8])


def test_a_composition_adds_the_losses_of_its_parts_and_prefers_an_orthogonal_start():
    _, routing = example()
    both = Composition({"lbl": LoadBalancingLoss(1.0), "simbal": SimBal(0.1, "fp32")})
    assert {name: loss_L.item() for name, loss_L in both.losses([routing]).items()} == pytest.approx(
        {"lbl": 19 / 8, "simbal": 0.15}
    )
    assert both.router_init == "orthogonal"
    assert Composition({"lbl": LoadBalancingLoss(1.0)}).router_init == "normal"
    assert both.expert_bias() is None


def test_no_balancing_costs_nothing_and_a_dense_model_has_no_loss():
    _, routing = example()
    assert NoBalancing().loss(routing) == 0
    assert Composition({"none": NoBalancing()}).losses([]) == {}


@pytest.mark.parametrize("coef", [-0.1, float("nan"), float("inf"), "much", True])
def test_a_coefficient_that_is_no_finite_number_of_at_least_zero_is_refused(coef):
    with pytest.raises(UserError, match=r"balancing\.lbl\.coef=.* must be a finite number of at least 0"):
        LoadBalancingLoss(coef)


def test_an_unknown_gram_dtype_is_refused():
    with pytest.raises(UserError, match="gram_dtype=fp8 is not one of fp32, bf16"):
        SimBal(0.1, "fp8")
