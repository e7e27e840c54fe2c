"""Strategies that change the logits: cosine router, prototypes, logit normalization, temperature, Sinkhorn."""

from dataclasses import replace

import pytest
import torch

from simbal.balancing.composition import build_balancing
from simbal.balancing.logits import (
    CosineRouter,
    LogitNorm,
    PrototypeRouter,
    Sinkhorn,
    Temperature,
    expert_potential,
    sums_and_number,
)
from simbal.conformance import FACTS, batch_of, composed_module, tiny_model, train
from simbal.model.router import Routing
from simbal.training.optimizer import parameter_groups
from tests.balancing.cases import registered
from tests.balancing.example import LOGITS_NE, candidates, finished

KEYS = registered()
ROWS_ED = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]])


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def skewed(N=600, E=8) -> torch.Tensor:
    """Logits that favor low indices."""
    return random(N, E, seed=0) + torch.linspace(2, -2, E)


@pytest.mark.parametrize("make", [CosineRouter, lambda scale: PrototypeRouter(scale=scale)])
def test_scaled_cosines_worked_out_by_hand(make):
    logits_NE = make(2.0).logits(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), ROWS_ED, layer=0)
    assert logits_NE[0].tolist() == pytest.approx([1.2, 1.6, 0.282843], abs=1e-6)
    assert logits_NE[1].tolist() == [0, 0, 0]


def routing_of(x_ND, experts_NK, num_experts=3) -> Routing:
    routing = Routing.of_logits(torch.zeros(len(x_ND), num_experts), 1, ROWS_ED)
    return replace(routing, topk_experts_NK=experts_NK, x_ND=x_ND)


def moved(strategy, weight_ED, routings) -> torch.Tensor:
    weight_ED = weight_ED.clone()
    measured = sum(strategy.measure([routing]) for routing in routings)
    strategy.update(finished(measured, len(routings), weights=[weight_ED]))
    return weight_ED


def test_a_prototype_moves_toward_the_mean_of_its_tokens_and_stays_without_tokens():
    first = routing_of(torch.tensor([[3.0, 4.0], [7.0, 0.0]]), torch.tensor([[0], [1]]))
    second = routing_of(torch.tensor([[-1.0, 0.0]]), torch.tensor([[1]]))
    weight_ED = moved(PrototypeRouter(decay=0.9), ROWS_ED, [first, second])
    torch.testing.assert_close(weight_ED, torch.tensor([[1.2, 0.4], [0.3, 1.8], [-1.0, 1.0]]))
    assert moved(PrototypeRouter(decay=0.0), ROWS_ED, [first]).tolist() == [[3, 4], [7, 0], [-1, 1]]


def test_sums_count_a_token_for_each_of_its_experts_and_ignore_empty_slots():
    x_ND = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    measured_EM = sums_and_number(routing_of(x_ND, torch.tensor([[2, 0, 3], [0, 3, 3]])))
    assert measured_EM.tolist() == [[11, 22, 2], [0, 0, 0], [1, 2, 1]]


def test_training_moves_prototypes_by_hidden_states_only_and_never_by_the_optimizer():
    module = composed_module(build_balancing({"prototype": KEYS["prototype"]}, FACTS, 100, "sum"))
    before = [router.weight_ED.clone() for router in module.model.routers]
    frozen = {id(router.weight_ED) for router in module.model.routers}
    groups = parameter_groups(module.model, module.optim)
    assert not frozen & {id(parameter) for group in groups for parameter in group["params"]}
    _, routings = module.model(batch_of(0)[:, :-1], module.balancing)
    train(module, range(1))
    for router, old_ED, routing in zip(module.model.routers, before, routings, strict=True):
        assert router.weight_ED.grad is None
        for expert, row in enumerate(old_ED):
            own_N = (routing.topk_experts_NK == expert).any(1)
            expected = 0.99 * row + 0.01 * routing.x_ND[own_N].mean(0) if own_N.any() else row
            torch.testing.assert_close(router.weight_ED[expert], expected)


def test_each_layer_has_its_own_temperature():
    strategy = Temperature(3.0, of_layers=[0.5, 2.0])
    strategy.prepare(tiny_model().routers)
    logits = [strategy.logits(LOGITS_NE, torch.eye(4), layer) for layer in (0, 1)]
    assert torch.equal(logits[0], 2 * LOGITS_NE)
    assert torch.equal(logits[1], LOGITS_NE / 2)


def test_normalized_logits_have_the_given_standard_deviation_and_the_same_choice():
    logits_NE = 7 * skewed(20) - 3
    normed_NE = LogitNorm(2.0).adjust_logits(logits_NE)
    torch.testing.assert_close(normed_NE.std(1, correction=0), torch.full((20,), 2.0))
    torch.testing.assert_close(normed_NE.mean(1), torch.zeros(20), atol=1e-6, rtol=0)
    assert torch.equal(normed_NE.topk(2).indices, logits_NE.topk(2).indices)


def test_equal_logits_stay_equal_with_a_finite_gradient():
    logits_NE = torch.zeros(2, 4, requires_grad=True)
    normed_NE = LogitNorm(1.0).adjust_logits(logits_NE)
    assert not normed_NE.any()
    assert torch.autograd.grad(normed_NE[0, 0], logits_NE)[0].isfinite().all()


def test_sinkhorn_makes_the_marginals_even():
    logits_NE = skewed().double()
    shares_NE = (logits_NE + expert_potential(logits_NE, 50)).softmax(1)
    torch.testing.assert_close(shares_NE.sum(0), torch.full((8,), 600 / 8).double(), rtol=1e-4, atol=0)


def test_sinkhorn_evens_the_load_in_training_and_does_not_change_evaluation():
    strategy = Sinkhorn(10)
    experts_N = strategy.choice_scores(candidates(skewed())).argmax(1)
    assert torch.bincount(experts_N, minlength=8).max() < 1.5 * 75
    assert torch.equal(strategy.eval().choice_scores(candidates(skewed())), skewed())
