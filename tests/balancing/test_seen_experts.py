"""Losses that see the weights of experts: how the router is coupled to them, and how much they overlap."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.balancing.base import FinishedStep
from simbal.balancing.composition import Composition, build_balancing
from simbal.balancing.coupling import ExpertRouterCoupling, activations, excess, spread
from simbal.balancing.weight_losses import ExpertOverlap
from simbal.conformance import FACTS, Case, composed_module, route, tiny_model, train
from simbal.errors import UserError
from simbal.model.router import ExpertWeights, Router, Routing
from tests.balancing.cases import registered

KEYS = registered()
# arXiv 2512.23447, equation 3, on two experts of two channels: gates diag(2, 1) and diag(1, 1/2)
GATE_EFD = torch.stack([torch.diag(torch.tensor([2.0, 1.0])), torch.diag(torch.tensor([1.0, 0.5]))])


def together(*names: str) -> Composition:
    return build_balancing({name: KEYS[name] for name in names}, FACTS, 100, "sum")


def routing_of(weight_ED, gate_EFD) -> Routing:
    w13_E2FD = torch.stack([gate_EFD, torch.full_like(gate_EFD, 9.0)], 1)  # up is no part of the loss
    experts = ExpertWeights(w13_E2FD, torch.full_like(gate_EFD, 9.0))
    x_ND = torch.zeros(24, weight_ED.shape[1])
    return route(x_ND, weight_ED, Case("erc", ExpertRouterCoupling), ExpertRouterCoupling(), experts)


def router_of(weight_ED, layer=0) -> Router:
    router = Router(weight_ED.shape[1], len(weight_ED), 1, "softmax", renormalize=True, layer=layer)
    router.weight_ED.data.copy_(weight_ED)
    return router


def test_the_coupling_of_two_experts_worked_out_by_hand():
    ones_ED = torch.ones(2, 2)
    assert activations(torch.eye(2), GATE_EFD, ones_ED).tolist() == [[2, 1], [1, 0.5]]
    # expert 1 lets row 0 reach 1 and is itself at 0.5: once as a row, once as a column
    strategy = ExpertRouterCoupling(1, 2, coef=3.0)
    assert strategy.losses([routing_of(torch.eye(2), GATE_EFD)], None).tolist() == pytest.approx([3 * 0.25])


@given(st.integers(2, 5), st.floats(0, 2), st.integers(0, 100))
def test_the_excess_is_the_double_sum_of_the_equation(num_experts, alpha, seed):
    m = torch.rand(num_experts, num_experts, generator=torch.Generator().manual_seed(seed)).double()
    total = 0.0
    for i in range(num_experts):
        for j in range(num_experts):
            if i != j:
                total += max(m[i, j] - alpha * m[i, i], 0) + max(m[j, i] - alpha * m[i, i], 0)
    torch.testing.assert_close(excess(m, alpha), torch.as_tensor(total).double() / num_experts**2)


def test_the_spread_is_half_the_way_to_the_nearest_row():
    rows_ED = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 0.2]])
    expected = [0.1, math.hypot(1, 1.8) / 4, 0.1 / math.hypot(1, 0.2)]
    assert spread(rows_ED).tolist() == pytest.approx(expected)


def test_a_row_of_zeros_and_one_without_others_have_no_noise():
    assert spread(torch.tensor([[0.0, 0.0], [3.0, 4.0]])).tolist() == [0, 0.5]
    assert spread(torch.ones(1, 2)).tolist() == [0]


def prepared(weights, seed=0) -> ExpertRouterCoupling:
    strategy = ExpertRouterCoupling(seed=seed)
    strategy.prepare([router_of(weight_ED, layer) for layer, weight_ED in enumerate(weights)])
    return strategy


@given(st.integers(0, 100))
def test_a_row_times_its_noise_is_nearest_to_itself(seed):
    weight_ED = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
    noise_ED = prepared([weight_ED], seed)._noise(routing_of(weight_ED, torch.zeros(5, 3, 8)), 0)
    distance_EE = torch.cdist(weight_ED * noise_ED, weight_ED)
    assert distance_EE.argmin(1).tolist() == [0, 1, 2, 3, 4]


def test_the_noise_fills_its_interval_evenly_and_is_new_in_each_step_and_layer():
    weights = [torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))] * 2
    strategy, routing = prepared(weights), routing_of(weights[0], torch.zeros(2, 1, 4000))
    first, elsewhere = (strategy._noise(routing, layer) for layer in (0, 1))
    spread_E1 = strategy.spread_LE[0, :, None]
    unit = (first - 1) / spread_E1
    assert 0.99 < unit.abs().max() <= 1
    assert unit.mean().abs() < 4.5 / math.sqrt(3 * 8000)
    assert unit.var().item() == pytest.approx(1 / 3, rel=0.05)
    assert torch.equal(first, strategy._noise(routing, 0))
    strategy.update(FinishedStep(torch.zeros(2, 2), 1, weights, 0.1, 1.0))
    for other in (elsewhere, strategy._noise(routing, 0), prepared(weights, seed=1)._noise(routing, 0)):
        assert ((other == first).float().mean() < 0.01).all()
        assert abs(torch.corrcoef(torch.stack([other[0], first[0]]))[0, 1]) < 4.5 / math.sqrt(4000)


def test_the_spread_of_a_step_is_that_of_its_own_weights():
    module = composed_module(together("erc"))
    start = module.balancing.parts["erc"].spread_LE.clone()
    train(module, range(2))
    weights = [router.weight_ED for router in module.model.routers]
    now = torch.stack([spread(weight_ED) for weight_ED in weights]).detach()
    assert torch.equal(module.balancing.parts["erc"].spread_LE, now)
    assert not torch.equal(start, now)


def test_coupling_by_itself_makes_each_row_excite_its_own_expert_the_most():
    module = composed_module(together("erc"))
    router, layer = module.model.routers[0], module.model.feed_forwards[0]
    optimizer = torch.optim.SGD([router.weight_ED, layer.w13_E2FD], 0.3)
    strategy = module.balancing.parts["erc"]
    weights = [router.weight_ED for router in module.model.routers]
    for _ in range(300):
        routing = routing_of(router.weight_ED, layer.w13_E2FD[:, 0])
        optimizer.zero_grad()
        strategy.losses([routing], None).sum().backward()
        optimizer.step()
        with torch.no_grad():
            strategy.update(FinishedStep(torch.zeros(2, 6), 1, weights, 0.1, 1.0))
    m = activations(router.weight_ED, layer.w13_E2FD[:, 0], torch.ones_like(router.weight_ED))
    assert m.argmax(0).tolist() == m.argmax(1).tolist() == [0, 1, 2, 3, 4, 5]


def overlap(experts: ExpertWeights) -> float:
    weight_ED = torch.ones(len(experts.w2_EFD), experts.w2_EFD.shape[2])
    routing = route(torch.zeros(24, weight_ED.shape[1]), weight_ED, Case("it", ExpertOverlap), ExpertOverlap(), experts)
    return ExpertOverlap(coef=2.0).loss(routing).item()


def test_the_overlap_of_three_experts_worked_out_by_hand():
    # (gate, up, down) of one number each: cosines 3/5, 0 and 4/5
    first, second, third = ((1.0, 0.0, 0.0), (3.0, 4.0, 0.0), (0.0, 2.0, 0.0))
    numbers_EP = torch.tensor([first, second, third])
    experts = ExpertWeights(numbers_EP[:, :2].view(3, 2, 1, 1), numbers_EP[:, 2:].view(3, 1, 1))
    assert overlap(experts) == pytest.approx(2 * (0.36 + 0.64) / 3)


def test_the_overlap_is_of_directions_and_of_all_three_matrices():
    experts = ExpertWeights(*(each.detach() for each in _experts()))
    assert overlap(ExpertWeights(3 * experts.w13_E2FD, 3 * experts.w2_EFD)) == pytest.approx(overlap(experts))
    for part in ((experts.w13_E2FD + torch.tensor([1.0, 0.0])[:, None, None], experts.w2_EFD),
                 (experts.w13_E2FD + torch.tensor([0.0, 1.0])[:, None, None], experts.w2_EFD),
                 (experts.w13_E2FD, experts.w2_EFD + 1)):  # fmt: skip
        assert overlap(ExpertWeights(*part)) > overlap(experts)


def _experts() -> ExpertWeights:
    layer = tiny_model().feed_forwards[0]
    return ExpertWeights(layer.w13_E2FD, layer.w2_EFD)


@pytest.mark.parametrize("name", ["erc", "expert_overlap"])
def test_experts_can_be_trained_against_a_router_that_is_not(name):
    balancing, model = together(name, "frozen"), tiny_model()
    balancing.prepare(model.routers)
    _, routings = model(torch.zeros(1, 4, dtype=torch.int64), balancing)
    balancing.losses(routings)[name].backward()
    assert all(layer.w13_E2FD.grad.any() for layer in model.feed_forwards)
    assert all(router.weight_ED.grad is None for router in model.routers)


def test_a_strategy_of_another_model_is_refused():
    with pytest.raises(UserError, match="made for num_layers=3 and num_experts=2, but the model has num_layers=1"):
        ExpertRouterCoupling(3, 2).prepare([router_of(torch.eye(4))])
