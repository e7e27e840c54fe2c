"""ReMoE on the worked example: what its gating makes of logits, its penalty, and the rule that moves it."""

from dataclasses import replace

import pytest
import torch

from simbal.balancing.base import FinishedStep
from simbal.balancing.composition import Composition
from simbal.balancing.controls import NoBalancing
from simbal.balancing.lbl import LoadBalancingLoss
from simbal.balancing.ragged import ReMoE
from simbal.conformance import composed_module, train
from simbal.errors import UserError
from simbal.model.router import Router, Routing, apply_gating, log_scores, topk_weights
from tests.balancing.ragged_example import LOGITS_NE, routing_by

NOTHING_NE = torch.tensor([[-1.0, -2.0, 0.0, -0.5]])


def routing(strategy, logits_NE=LOGITS_NE) -> Routing:
    return Routing.of_logits(
        logits_NE.clone().requires_grad_(), 2, torch.eye(4), gating="relu", renormalize=False, ragged=True,
        choice_scores=lambda logits_NE, _: logits_NE.masked_fill(logits_NE <= 0, -torch.inf),
    )  # fmt: skip


def finished(*surplus) -> FinishedStep:
    return FinishedStep(torch.tensor(surplus), 2, [], 0.1, 1.0)


def test_a_weight_is_what_is_above_0_of_a_logit():
    strategy = ReMoE()
    table_NE = routing_by(strategy, "relu", renormalize=False).topk_probs_NK
    expected = [[2, 1, 0, 0], [1.5, 0.5, 0, 0], [0.8, 0.2, 0.1, 0], [1, 0.9, 0, 0]]
    torch.testing.assert_close(table_NE, torch.tensor(expected))
    assert apply_gating(torch.tensor([[0.0, -1.0, 2.0]]), "relu").tolist() == [[0, 0, 2]]


@pytest.mark.parametrize(("balanced", "value"), [(True, 3.4375), (False, 2.0)])
def test_the_penalty_on_the_example(balanced, value):
    strategy = ReMoE(coef=0.5, balanced=balanced)
    layer = routing(strategy)
    assert layer.tokens_per_expert_E.tolist() == [4, 3, 1, 1]
    loss = strategy.loss(layer)
    assert loss.item() == pytest.approx(0.5 * value)
    loss.backward()
    each = torch.tensor([0.5, 0.375, 0.125, 0.125]) if balanced else torch.full((4,), 0.25)
    torch.testing.assert_close(layer.logits_NE.grad, 0.5 * each * (LOGITS_NE > 0))


def test_both_forms_agree_where_the_load_is_even():
    even_NE = torch.tensor([[1.0, 2.0, -1.0, -1.0], [-1.0, -1.0, 0.5, 3.0]])
    values = [ReMoE(1.0, balanced=balanced).loss(routing(None, even_NE)).item() for balanced in (True, False)]
    assert values == pytest.approx([3.25, 3.25])


def test_lambda_rises_with_too_many_experts_falls_with_too_few_and_else_stays():
    strategy = ReMoE(coef=1e-8, alpha=1.2, balanced=False)
    layer = routing(strategy)
    assert strategy.measure([layer, layer]).tolist() == [1, 1]  # 9 uses of 4 tokens that may have 8
    lambdas = [strategy.loss(layer).item() / 2]
    for step in (finished(1, 1), finished(3, -2), finished(2, -2), finished(-1, 0), finished(-5, 4)):
        strategy.update(step)
        lambdas.append(strategy.loss(layer).item() / 2)
    assert lambdas == pytest.approx([1e-8, 1.2e-8, 1.44e-8, 1.44e-8, 1.2e-8, 1e-8], rel=1e-6)


def test_lambda_waits_for_the_start_of_its_schedule():
    strategy = ReMoE(coef=1.0, balanced=False)
    for _ in range(1000):
        strategy.update(replace(finished(1), factor=0.0))
    strategy.update(finished(1))
    assert strategy.loss(routing(None)).item() == pytest.approx(2.0 * 1.2)


def test_lambda_comes_back_from_below_the_smallest_number():
    strategy, layer = ReMoE(coef=1.0, balanced=False), routing(None)
    for surplus in [-1] * 1000 + [1] * 1000:
        strategy.update(finished(surplus))
        assert strategy.loss(layer).isfinite()
    assert strategy.loss(layer).item() == pytest.approx(2.0)


@pytest.mark.parametrize(("coef", "too_many"), [(1e-4, False), (0.0, True)])
def test_the_penalty_brings_the_number_of_experts_down_to_k(coef, too_many):
    strategy = ReMoE(coef)
    module = composed_module(Composition({"remoe": strategy}, {}), "relu")
    used = [step.counts_LE.sum().item() / 64 for step in train(module, range(80))]  # of 64 tokens in two layers
    assert used[0] > 2.5
    assert (sum(used[-20:]) / 20 > 2.5) == too_many
    assert (int(strategy.raised) == 0) == too_many, "what does not act is not raised"


def test_a_token_without_a_logit_above_0_has_no_expert_and_an_even_distribution():
    layer = routing(None, torch.cat([NOTHING_NE, LOGITS_NE[:1]]))
    assert layer.topk_experts_NK[0].tolist() == [4, 4, 4, 4]
    torch.testing.assert_close(layer.distribution_NE, torch.tensor([[0.25] * 4, [2 / 3, 1 / 3, 0, 0]]))
    (gradient_NE,) = torch.autograd.grad(layer.distribution_NE[:, 0].sum(), layer.logits_NE)
    torch.testing.assert_close(gradient_NE, torch.tensor([[0, 0, 0, 0], [1 / 9, -2 / 9, 0, 0]]))
    weights_NK = topk_weights(NOTHING_NE, NOTHING_NE.relu(), torch.tensor([[0, 2]]), "relu", renormalize=True)
    assert weights_NK.tolist() == [[0.5, 0.5]]
    assert log_scores(NOTHING_NE, "relu").isfinite().all()


def test_a_load_balancing_loss_beside_it_is_finite_with_its_gradient():
    for gates in ("dense", "sparse_raw", "sparse_renorm"):
        layer = routing(None, torch.cat([NOTHING_NE, LOGITS_NE]))
        loss = LoadBalancingLoss(gates=gates).loss(layer)
        loss.backward()
        assert loss > 0
        assert layer.logits_NE.grad.isfinite().all()


@pytest.mark.parametrize(
    ("gating", "renormalize"), [("softmax", True), ("softmax", False), ("sigmoid", False), ("relu", True)]
)
def test_other_routers_are_refused(gating, renormalize):
    with pytest.raises(UserError, match="balancing=remoe takes the logits above 0 .* so that it brings router=relu"):
        ReMoE().prepare([Router(4, 4, 2, gating, renormalize, layer=0)])


def test_relu_without_it_is_refused():
    with pytest.raises(UserError, match="router=relu gives an expert .* and only balancing=remoe leaves it out"):
        Composition({"none": NoBalancing()}, {}).prepare([Router(4, 4, 2, "relu", False, layer=0)])


def test_alpha_must_be_above_1():
    with pytest.raises(UserError, match="alpha=1 must be above 1"):
        ReMoE(alpha=1)
