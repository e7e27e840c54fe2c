"""Routing with a varying number of experts per token, ReMoE and top-p routing, on a worked example."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.balancing.composition import Composition
from simbal.balancing.lbl import LoadBalancingLoss
from simbal.balancing.ragged import ReMoE, TopP
from simbal.conformance import composed_module, train
from simbal.errors import UserError
from simbal.model.router import Router, Routing, apply_gating, log_scores, topk_weights
from tests.balancing.example import LOGITS_NE, candidates, finished, finite_sets, routing_by

EXCLUDED_NE = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]).bool()
SCORES_NE = LOGITS_NE.masked_fill(EXCLUDED_NE, -torch.inf)
NEGATIVE_NE = torch.tensor([[-1.0, -2.0, 0.0, -0.5]])


def routing(scores_NE=SCORES_NE, gating="softmax", renormalize=False) -> Routing:
    return Routing.of_logits(
        LOGITS_NE.clone().requires_grad_(), 2, torch.eye(4), gating=gating, renormalize=renormalize,
        choice_scores=lambda *_: scores_NE, ragged=True,
    )  # fmt: skip


def relu_routing(logits_NE=LOGITS_NE) -> Routing:
    return Routing.of_logits(
        logits_NE.clone().requires_grad_(), 2, torch.eye(4), gating="relu", renormalize=False, ragged=True,
        choice_scores=lambda logits_NE, _: logits_NE.masked_fill(logits_NE <= 0, -torch.inf),
    )  # fmt: skip


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_a_token_has_all_experts_with_a_finite_score_and_their_weights(gating, renormalize):
    ragged = routing(gating=gating, renormalize=renormalize)
    assert ragged.topk_experts_NK.tolist() == [[0, 2, 3, 4], [0, 2, 1, 3], [4, 4, 4, 4], [3, 4, 4, 4]]
    assert ragged.tokens_per_expert_E.tolist() == [2, 1, 2, 3]
    chosen_NE = apply_gating(LOGITS_NE, gating) * (-torch.inf < SCORES_NE)
    if renormalize:
        chosen_NE = (chosen_NE / chosen_NE.sum(1, keepdim=True)).nan_to_num()
    table_NE = torch.zeros(4, 5).scatter(1, ragged.topk_experts_NK, ragged.topk_probs_NK)
    torch.testing.assert_close(table_NE[:, :4], chosen_NE)
    assert not table_NE[:, 4].any()


def test_a_token_without_experts_has_a_gradient_of_zero():
    ragged = routing(renormalize=True)
    ragged.topk_probs_NK.square().sum().backward()
    gradient_NE = ragged.logits_NE.grad
    assert gradient_NE.isfinite().all()
    assert gradient_NE.any(1).tolist() == [True, True, False, False]


def test_for_one_ragged_batch_the_scopes_micro_and_global_of_lbl_agree():
    layer = routing_by(TopP(0.6))
    micro, step = (LoadBalancingLoss(scope=scope, choice="biased") for scope in ("micro", "global"))
    assert step.losses([layer], step.measure([layer])).item() == pytest.approx(micro.loss(layer).item())


def test_relu_weights_are_the_positive_logits():
    routing = routing_by(ReMoE(), "relu", renormalize=False)
    expected = [[2, 1, 0, 0], [1.5, 0.5, 0, 0], [0.8, 0.2, 0.1, 0], [1, 0.9, 0, 0]]
    torch.testing.assert_close(routing.topk_probs_NK, torch.tensor(expected))
    assert routing.tokens_per_expert_E.tolist() == [4, 3, 1, 1]  # a logit of 0 is not chosen


@pytest.mark.parametrize(("balanced", "value"), [(True, 3.4375), (False, 2.0)])
def test_the_penalty_of_remoe_on_the_example(balanced, value):
    strategy, layer = ReMoE(coef=0.5, balanced=balanced), relu_routing()
    assert layer.tokens_per_expert_E.tolist() == [4, 3, 1, 1]
    loss = strategy.loss(layer)
    assert loss.item() == pytest.approx(0.5 * value)
    loss.backward()
    each = torch.tensor([0.5, 0.375, 0.125, 0.125]) if balanced else torch.full((4,), 0.25)
    torch.testing.assert_close(layer.logits_NE.grad, 0.5 * each * (LOGITS_NE > 0))


def test_lambda_rises_with_too_many_experts_and_falls_with_too_few():
    strategy, layer = ReMoE(coef=1e-8, alpha=1.2, balanced=False), relu_routing()
    assert strategy.measure([layer, layer]).tolist() == [1, 1]  # 9 uses of 4 tokens that may have 8
    lambdas = [strategy.loss(layer).item() / 2]
    for surplus in ([1, 1], [3, -2], [2, -2], [-1, 0], [-5, 4]):
        strategy.update(finished(surplus, 2))
        lambdas.append(strategy.loss(layer).item() / 2)
    assert lambdas == pytest.approx([1e-8, 1.2e-8, 1.44e-8, 1.44e-8, 1.2e-8, 1e-8], rel=1e-6)


def test_lambda_waits_for_its_schedule_and_recovers_from_underflow():
    strategy, layer = ReMoE(coef=1.0, balanced=False), relu_routing()
    for _ in range(1000):
        strategy.update(finished([1], factor=0.0))
    assert strategy.loss(layer).item() == pytest.approx(2.0)
    for surplus in [-1] * 1000 + [1] * 1001:
        strategy.update(finished([surplus]))
        assert strategy.loss(layer).isfinite()
    assert strategy.loss(layer).item() == pytest.approx(2.0 * 1.2)


@pytest.mark.parametrize(("coef", "too_many"), [(1e-4, False), (0.0, True)])
def test_the_penalty_reduces_the_number_of_experts_to_k(coef, too_many):
    strategy = ReMoE(coef)
    module = composed_module(Composition({"remoe": strategy}, {}), "relu")
    used = [step.counts_LE.sum().item() / 64 for step in train(module, range(80))]  # 64 tokens in two layers
    assert used[0] > 2.5
    assert (sum(used[-20:]) / 20 > 2.5) == too_many
    assert (int(strategy.raised) == 0) == too_many, "without a loss, lambda must not grow"


@pytest.mark.parametrize(("gating", "renormalize"), [("softmax", False), ("relu", True)])
def test_remoe_needs_relu_weights_without_renormalization(gating, renormalize):
    with pytest.raises(UserError, match=r"router=relu with router.renormalize=false"):
        ReMoE().prepare([Router(4, 4, 2, gating, renormalize, layer=0)])


def test_a_token_without_positive_logits_has_no_experts_and_a_uniform_distribution():
    layer = relu_routing(torch.cat([NEGATIVE_NE, LOGITS_NE[:1]]))
    assert layer.topk_experts_NK[0].tolist() == [4, 4, 4, 4]
    torch.testing.assert_close(layer.distribution_NE, torch.tensor([[0.25] * 4, [2 / 3, 1 / 3, 0, 0]]))
    (gradient_NE,) = torch.autograd.grad(layer.distribution_NE[:, 0].sum(), layer.logits_NE)
    torch.testing.assert_close(gradient_NE, torch.tensor([[0, 0, 0, 0], [1 / 9, -2 / 9, 0, 0]]))
    weights_NK = topk_weights(NEGATIVE_NE, NEGATIVE_NE.relu(), torch.tensor([[0, 2]]), "relu", renormalize=True)
    assert weights_NK.tolist() == [[0.5, 0.5]]
    assert log_scores(NEGATIVE_NE, "relu").isfinite().all()


@pytest.mark.parametrize("gates", ["dense", "sparse_raw", "sparse_renorm"])
def test_lbl_of_relu_routing_is_finite_with_its_gradient(gates):
    layer = relu_routing(torch.cat([NEGATIVE_NE, LOGITS_NE]))
    loss = LoadBalancingLoss(gates=gates).loss(layer)
    loss.backward()
    assert loss > 0
    assert layer.logits_NE.grad.isfinite().all()


@pytest.mark.parametrize(("p", "mean"), [(0.6, 1.5), (0.8, 2.25)])
def test_top_p_on_the_example(p, mean):
    layer = routing_by(TopP(p, 1.0))
    assert layer.tokens_per_expert_E.sum() / 4 == mean
    assert TopP(p, 1.0).loss(layer).item() == pytest.approx(1.068180, abs=1e-6)


def test_the_sum_must_exceed_p_strictly():
    even = candidates(torch.zeros(4, 4))
    assert finite_sets(TopP(0.5).choice_scores(even)) == [{0, 1, 2}] * 4
    assert finite_sets(TopP(0.0).choice_scores(even)) == [{0}] * 4


@given(st.integers(2, 9), st.floats(0, 0.99), st.integers(0, 99), st.sampled_from(["softmax", "sigmoid"]))
def test_top_p_uses_the_fewest_experts_that_exceed_p(num_experts, p, seed, gating):
    logits_NE = 3 * torch.randn(4, num_experts, generator=torch.Generator().manual_seed(seed))
    each = candidates(logits_NE, gating=gating)
    for probs_E, scores_E in zip(each.probs_NE.double(), TopP(p).choice_scores(each), strict=True):
        used = scores_E > -torch.inf
        total, bound = probs_E[used].sum(), p * probs_E.sum()
        assert total > bound - 1e-9
        assert total - probs_E[used].min() <= bound + 1e-9
        assert used.all() or probs_E[used].min() >= probs_E[~used].max()


def test_top_p_handles_sigmoids_of_zero_and_certain_tokens():
    logits_NE = torch.full((4, 4), -300.0).requires_grad_()
    assert finite_sets(TopP().choice_scores(candidates(logits_NE.detach(), gating="sigmoid"))) == [{0, 1, 2, 3}] * 4
    loss = TopP(coef=1.0).loss(Routing.of_logits(logits_NE, 2, torch.eye(4), gating="sigmoid"))
    assert loss.item() == pytest.approx(math.log(4))
    certain_NE = torch.tensor([[300.0, 0.0, 0.0, 0.0]]).requires_grad_()
    certain = TopP(coef=1.0).loss(replace(Routing.of_logits(certain_NE, 2, torch.eye(4))))
    (loss + certain).backward()
    assert logits_NE.grad.isfinite().all()
    assert certain_NE.grad.isfinite().all()
