"""Expert-router coupling follows arXiv 2512.23447, equations 3 and 4."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.balancing.composition import build_balancing
from simbal.balancing.coupling import ExpertRouterCoupling, activations, excess, spread
from simbal.conformance import FACTS, Case, route, tiny_model
from simbal.model.router import ExpertWeights, Router, Routing
from tests.balancing.cases import registered
from tests.balancing.example import finished

KEYS = registered()
# two experts of two channels: gates diag(2, 1) and diag(1, 1/2)
GATE_EFD = torch.stack([torch.diag(torch.tensor([2.0, 1.0])), torch.diag(torch.tensor([1.0, 0.5]))])


def together(*names: str):
    return build_balancing({name: KEYS[name] for name in names}, FACTS, 100, "sum")


def routing_of(weight_ED, gate_EFD) -> Routing:
    w13_E2FD = torch.stack([gate_EFD, torch.full_like(gate_EFD, 9.0)], 1)  # up and down do not enter the loss
    experts = ExpertWeights(w13_E2FD, torch.full_like(gate_EFD, 9.0))
    x_ND = torch.zeros(24, weight_ED.shape[1])
    routing = route(x_ND, weight_ED, Case("erc", ExpertRouterCoupling), ExpertRouterCoupling())
    return replace(routing, experts=experts)


def prepared(weights, seed=0) -> ExpertRouterCoupling:
    strategy, routers = ExpertRouterCoupling(seed=seed), []
    for layer, weight_ED in enumerate(weights):
        routers.append(Router(weight_ED.shape[1], len(weight_ED), 1, "softmax", renormalize=True, layer=layer))
        routers[-1].weight_ED.data.copy_(weight_ED)
    strategy.prepare(routers)
    return strategy


def test_the_coupling_of_two_experts_worked_out_by_hand():
    assert activations(torch.eye(2), GATE_EFD, torch.ones(2, 2)).tolist() == [[2, 1], [1, 0.5]]
    # expert 1 has 0.5 and lets row 0 reach 1: once in a row, once in a column
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


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1.0, 0.0], [0.0, 2.0], [1.0, 0.2]], [0.1, math.hypot(1, 1.8) / 4, 0.1 / math.hypot(1, 0.2)]),
        ([[0.0, 0.0], [3.0, 4.0]], [0, 0.5]),
        ([[1.0, 1.0]], [0]),
    ],
)
def test_the_spread_is_half_the_relative_distance_to_the_nearest_row(rows, expected):
    assert spread(torch.tensor(rows)).tolist() == pytest.approx(expected)


@given(st.integers(0, 100))
def test_a_row_times_its_noise_is_nearest_to_itself(seed):
    weight_ED = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
    noise_ED = prepared([weight_ED], seed)._noise(routing_of(weight_ED, torch.zeros(5, 3, 8)), 0)
    assert torch.cdist(weight_ED * noise_ED, weight_ED).argmin(1).tolist() == [0, 1, 2, 3, 4]


def test_the_noise_is_uniform_and_different_in_each_step_layer_and_seed():
    weights = [torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))] * 2
    strategy, routing = prepared(weights), routing_of(weights[0], torch.zeros(2, 1, 4000))
    first, other_layer = (strategy._noise(routing, layer) for layer in (0, 1))
    unit = (first - 1) / strategy.spread_LE[0, :, None]
    assert 0.99 < unit.abs().max() <= 1
    assert unit.mean().abs() < 4.5 / math.sqrt(3 * 8000)
    assert unit.var().item() == pytest.approx(1 / 3, rel=0.05)
    assert torch.equal(first, strategy._noise(routing, 0))
    strategy.update(finished(torch.zeros(2, 2), weights=weights))
    for other in (other_layer, strategy._noise(routing, 0), prepared(weights, seed=1)._noise(routing, 0)):
        assert abs(torch.corrcoef(torch.stack([other[0], first[0]]))[0, 1]) < 4.5 / math.sqrt(4000)


@pytest.mark.parametrize("name", ["erc", "expert_overlap"])
def test_losses_of_experts_train_the_experts_of_a_frozen_router(name):
    balancing, model = together(name, "frozen"), tiny_model()
    balancing.prepare(model.routers)
    _, routings = model(torch.zeros(1, 4, dtype=torch.int64), balancing)
    balancing.losses(routings)[name].backward()
    assert all(layer.w13_E2FD.grad.any() for layer in model.feed_forwards)
    assert all(router.weight_ED.grad is None for router in model.routers)
