"""Other maps from hidden states to logits: cosines, running means of hidden states, and temperatures."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.balancing.base import FinishedStep
from simbal.balancing.composition import build_balancing
from simbal.balancing.logits import CosineRouter, PrototypeRouter, Temperature, sums_and_number
from simbal.conformance import FACTS, Case, batch_of, composed_module, route, tiny_model, train
from simbal.errors import UserError
from simbal.model.router import Routing, gate
from simbal.training.optimizer import parameter_groups
from tests.balancing.cases import registered
from tests.balancing.test_ragged import LOGITS_NE

KEYS = registered()
# the rows of a router, and their cosines with (3, 4)
ROWS_ED = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]])
COSINES = [0.6, 0.8, 0.141421]


def together(*names: str):
    return build_balancing({name: KEYS[name] for name in names}, FACTS, 100, "sum")


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("make", [CosineRouter, lambda scale: PrototypeRouter(scale=scale)])
def test_scaled_cosines_worked_out_by_hand(make):
    logits_NE = make(2.0).logits(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), ROWS_ED, layer=0)
    assert logits_NE[0].tolist() == pytest.approx([2 * each for each in COSINES], abs=1e-6)
    assert logits_NE[1].tolist() == [0, 0, 0]


@given(st.integers(0, 100), st.floats(0.01, 100), st.floats(0.01, 100))
def test_a_cosine_sees_no_length(seed, longer_x, longer_row):
    x_ND, rows_ED = random(7, 5, seed=seed), random(3, 5, seed=seed + 1)
    strategy = CosineRouter(3.0)
    logits_NE = strategy.logits(x_ND, rows_ED, 0)
    assert logits_NE.abs().max() <= 3.0001
    rows_ED[1] *= longer_row
    torch.testing.assert_close(strategy.logits(longer_x * x_ND, rows_ED, 0), logits_NE, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", [CosineRouter, PrototypeRouter])
@pytest.mark.parametrize("scale", [0, -1.0])
def test_a_scale_that_is_not_above_0_is_refused(strategy, scale):
    with pytest.raises(UserError, match=f"scale={scale} must be"):
        strategy(scale=scale)


def routing_of(x_ND, experts_NK, num_experts=3) -> Routing:
    logits_NE = torch.zeros(len(x_ND), num_experts)
    return replace(Routing.of_logits(logits_NE, 1, ROWS_ED), topk_experts_NK=experts_NK, x_ND=x_ND)


def moved(strategy, weight_ED, routings) -> torch.Tensor:
    weight_ED = weight_ED.clone()
    measured = sum(strategy.measure([routing]) for routing in routings)
    strategy.update(FinishedStep(measured, len(routings), [weight_ED], 0.1, 1.0))
    return weight_ED


def test_a_row_moves_towards_the_mean_of_what_chose_it_and_one_without_tokens_stays():
    first = routing_of(torch.tensor([[3.0, 4.0], [7.0, 0.0]]), torch.tensor([[0], [1]]))
    second = routing_of(torch.tensor([[-1.0, 0.0]]), torch.tensor([[1]]))
    weight_ED = moved(PrototypeRouter(decay=0.9), ROWS_ED, [first, second])
    torch.testing.assert_close(weight_ED, torch.tensor([[1.2, 0.4], [0.3, 1.8], [-1.0, 1.0]]))
    alone_ED = moved(PrototypeRouter(decay=0.0), ROWS_ED, [first])
    assert alone_ED.tolist() == [[3, 4], [7, 0], [-1, 1]]


def test_sums_count_a_token_for_each_of_its_experts_and_no_empty_slot():
    x_ND = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    measured_EM = sums_and_number(routing_of(x_ND, torch.tensor([[2, 0, 3], [0, 3, 3]])))
    assert measured_EM.tolist() == [[11, 22, 2], [0, 0, 0], [1, 2, 1]]


def test_prototypes_follow_clusters_that_they_started_far_from():
    centres_ED = torch.tensor([[8.0, 0.0, 0.0], [0.0, 8.0, 0.0], [0.0, 0.0, 8.0]])
    x_ND = centres_ED.repeat(50, 1) + random(150, 3, seed=0)
    strategy, weight_ED = PrototypeRouter(decay=0.5), torch.tensor([[1.0, 0.4, 0.3], [0.4, 1.0, 0.5], [0.2, 0.5, 1.0]])
    for _ in range(20):
        logits_NE = strategy.logits(x_ND, weight_ED, 0)
        weight_ED = moved(strategy, weight_ED, [routing_of(x_ND, logits_NE.topk(1).indices)])
    torch.testing.assert_close(weight_ED, torch.stack([x_ND[i::3].mean(0) for i in range(3)]), rtol=1e-3, atol=1e-3)


def test_training_moves_prototypes_by_the_hidden_states_alone_and_the_optimizer_never():
    module = composed_module(together("prototype"))
    before = [router.weight_ED.clone() for router in module.model.routers]
    names = {id(router.weight_ED) for router in module.model.routers}
    groups = parameter_groups(module.model, module.optim)
    assert not names & {id(parameter) for group in groups for parameter in group["params"]}
    _, routings = module.model(batch_of(0)[:, :-1], module.balancing)
    train(module, range(1))
    for router, old_ED, routing in zip(module.model.routers, before, routings, strict=True):
        assert router.weight_ED.grad is None
        for expert, row in enumerate(old_ED):
            mine_N = (routing.topk_experts_NK == expert).any(1)
            expected = 0.99 * row + 0.01 * routing.x_ND[mine_N].mean(0) if mine_N.any() else row
            torch.testing.assert_close(router.weight_ED[expert], expected)


@pytest.mark.parametrize(("names", "always"), [(("prototype",), True), (("lbl",), False)])
def test_inputs_are_kept_for_who_asks_for_them_also_after_an_auxiliary_gradient_was_measured(names, always):
    module = composed_module(together(*names))
    for measured in (False, True, False):
        module.measures_aux_gradient = lambda number, measured=measured: measured
        module.training_step(batch_of(0), 0)
        assert {router.keeps_input for router in module.model.routers} == {always}
    assert len(module._aux_gradients) == (not always)


@pytest.mark.parametrize("names", [("prototype", "frozen"), ("prototype", "ortho_param"), ("prototype", "ortho_mix")])
def test_only_one_strategy_sets_the_weight(names):
    with pytest.raises(UserError, match="both set the router's weight"):
        together(*names)


@pytest.mark.parametrize("names", [("prototype", "cosine"), ("cosine", "temperature")])
def test_only_one_strategy_maps_hidden_states(names):
    with pytest.raises(UserError, match="both map hidden states to logits"):
        together(*names)


def test_a_loss_on_prototypes_is_refused():
    with pytest.raises(UserError, match="simbal is a loss on the router's weight, and here nothing trains it"):
        together("simbal", "prototype").prepare(tiny_model().routers)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_that_keeps_everything_or_less_than_nothing_is_refused(decay):
    with pytest.raises(UserError, match="decay=.* must be at least 0 and below 1"):
        PrototypeRouter(decay=decay)


@pytest.mark.parametrize(("temperature", "entropy"), [(0.5, 0.4554), (1.0, 0.9475), (2.0, 1.2451)])
def test_the_entropy_of_a_token_at_three_temperatures(temperature, entropy):
    # rows of the identity make the hidden state the logits
    probs_E = gate(Temperature(temperature).logits(LOGITS_NE[:1], torch.eye(4), 0), "softmax")[0]
    assert -(probs_E * probs_E.log()).sum().item() == pytest.approx(entropy, abs=5e-5)


@pytest.mark.parametrize("gating", ["softmax", "sigmoid"])
def test_a_temperature_of_1_changes_no_bit_and_others_no_choice(gating):
    weight_ED, x_ND = random(6, 16, seed=1).double(), random(24, 16, seed=2).double()
    plain, one, hot = (
        route(x_ND, weight_ED, Case("it", lambda: None, gating), strategy)
        for strategy in (Temperature(of_layers=[1.0]), Temperature(1.0), Temperature(3.0))
    )
    assert torch.equal(plain.logits_NE, x_ND @ weight_ED.T)
    assert torch.equal(plain.logits_NE, one.logits_NE)
    assert torch.equal(hot.topk_experts_NK, one.topk_experts_NK)
    assert (hot.probs_NE.std(1) < one.probs_NE.std(1)).all()


def test_each_layer_has_its_own_temperature():
    strategy = Temperature(3.0, of_layers=[0.5, 2.0])
    strategy.prepare(tiny_model().routers)
    logits = [strategy.logits(LOGITS_NE, torch.eye(4), layer) for layer in (0, 1)]
    assert torch.equal(logits[0], 2 * LOGITS_NE)
    assert torch.equal(logits[1], LOGITS_NE / 2)


@pytest.mark.parametrize("temperature", [0, -1.0, float("inf"), float("nan")])
def test_a_temperature_that_is_none_is_refused(temperature):
    with pytest.raises(UserError, match=f"^temperature={temperature} must be above 0 and finite"):
        Temperature(temperature)
    with pytest.raises(UserError, match="^of_layers=.* must be above 0 and finite"):
        Temperature(of_layers=[1.0, temperature])


@pytest.mark.parametrize("numbers", [[], [1.0], [1.0, 1.0, 1.0]])
def test_a_list_of_another_length_than_the_layers_is_refused(numbers):
    with pytest.raises(UserError, match=rf"has {len(numbers)} temperatures for 2 layers: give one for each, or null"):
        Temperature(of_layers=numbers).prepare(tiny_model().routers)
