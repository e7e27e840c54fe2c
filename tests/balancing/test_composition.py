"""A set of strategies is the sum of its parts, each with its own coefficient and schedule."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.balancing.composition import Composition, build_balancing, build_strategy
from simbal.balancing.controls import NoBalancing
from simbal.config.schedule import Schedule
from simbal.conformance import FACTS, SIZES, batch_of, composed_module, tiny_model, train
from simbal.errors import UserError
from tests.balancing.cases import registered
from tests.balancing.example import example, mirrored

STRATEGIES = registered()


def strategy(name: str, **changes):
    return build_strategy(name, STRATEGIES[name] | changes, FACTS)


def together(*names: str, layer_reduce: str = "sum", **schedules) -> Composition:
    return Composition({name: strategy(name) for name in names}, schedules, layer_reduce)


def test_losses_add_and_layers_stay_apart():
    _, routing = example()
    routings = [routing, mirrored(routing)]
    both = together("lbl", "simbal").losses(routings)
    assert both["lbl"].item() == pytest.approx(0.01 * 2 * 19 / 8)
    assert both["simbal"].item() == pytest.approx(0.1 * 2 * 1.5)
    mean = together("lbl", "simbal", layer_reduce="mean").losses(routings)
    assert mean["lbl"].item() == pytest.approx(0.01 * 19 / 8)


@pytest.mark.parametrize(("pair", "alone"), [(("lf", "lbl"), "lbl"), (("lf", "simbal"), "simbal")])
def test_the_parts_of_a_loss_free_pair_give_the_same_numbers_alone_and_together(pair, alone):
    composed, loss_free, single = (composed_module(together(*names)) for names in (pair, ["lf"], [alone]))
    for module in (composed, loss_free, single):
        module.training_step(batch_of(0), 0)
        module.finish_step(0, 0.1)
    bias_LE = loss_free.balancing.parts["lf"].bias_LE
    assert bias_LE.any()
    assert torch.equal(composed.balancing.parts["lf"].bias_LE, bias_LE)
    steps = [module.training_step(batch_of(1), 0) for module in (composed, single)]
    if alone == "simbal":
        assert torch.equal(steps[0]["aux/simbal"], steps[1]["aux/simbal"])
    with torch.no_grad():
        _, routings = composed.model(batch_of(1)[:, :-1], composed.balancing)
    assert torch.equal(strategy(alone).losses(routings, None).sum(), steps[0][f"aux/{alone}"])


def test_an_orthogonal_start_is_taken_if_any_part_prefers_it():
    assert together("lbl", "simbal").router_init == "orthogonal"
    assert together("lf", "lbl").router_init == "normal"


@pytest.mark.parametrize("pair", [("lf", "quantile"), ("uniform", "hash"), ("lf", "sinkhorn")])
def test_two_strategies_that_choose_experts_exclude_each_other(pair):
    with pytest.raises(UserError, match=f"{pair[0]} and {pair[1]} both choose a token's experts"):
        together(*pair)


@pytest.mark.parametrize("pair", [("ortho_param", "ernie_ortho"), ("ernie_ortho", "ortho_param")])
def test_two_strategies_that_set_the_routers_weight_exclude_each_other(pair):
    together(*pair)  # a loss of the parametrised weight
    parts = {name: strategy(name, **{"decoupled": True} if name == "ernie_ortho" else {}) for name in pair}
    with pytest.raises(UserError, match=f"{pair[0]} and {pair[1]} both set the router's weight"):
        Composition(parts, {})


def test_a_dense_model_has_no_loss():
    balancing = Composition({"none": NoBalancing()}, {})
    assert balancing.losses([]) == {}
    assert balancing.measure([]) == {}


def test_a_schedule_scales_its_own_strategy_alone():
    _, routing = example()
    half = together("lbl", "simbal", lbl=Schedule(((0, 1.0), (10, 0.0))))
    full = together("lbl", "simbal").losses([routing], step=5)
    scaled = half.losses([routing], step=5)
    torch.testing.assert_close(scaled["lbl"], 0.5 * full["lbl"])
    assert torch.equal(scaled["simbal"], full["simbal"])


def test_a_schedule_scales_the_update_of_its_own_strategy_too():
    balancing = together("lf", lf=Schedule(((0, 1.0), (10, 0.0))))
    balancing.prepare(tiny_model().routers)
    bias_LE = balancing.parts["lf"].bias_LE
    load_LE = torch.arange(float(bias_LE.numel())).view_as(bias_LE)
    balancing.update({"lf": load_LE}, 1, [], 0.1, step=5)
    half_LE = bias_LE.clone()
    balancing.update({"lf": load_LE}, 1, [], 0.1, step=0)
    torch.testing.assert_close(bias_LE, 3 * half_LE)
    assert half_LE.any()


def test_a_coefficient_of_zero_trains_as_no_balancing_does():
    outcomes = []
    for part in ("none", "lbl", "simbal", "router_z_loss", "ernie_ortho", "offdiag_cosine", "row_norm"):
        changes = {} if part == "none" else {"coef": 0.0}
        module = composed_module(Composition({part: strategy(part, **changes)}, {}))
        train(module, range(3))
        outcomes.append(torch.cat([parameter.flatten() for parameter in module.model.parameters()]))
    assert all(torch.equal(outcomes[0], other) for other in outcomes[1:])


def test_no_strategy_changes_any_other_initial_weight():
    def others(name: str) -> dict:
        balancing = together(name)
        model = tiny_model(balancing.parts[name].gatings[0])
        balancing.prepare(model.routers)
        return {key: value for key, value in model.state_dict().items() if "router" not in key}

    plain = others("none")
    assert all(torch.equal(plain[key], value) for name in STRATEGIES for key, value in others(name).items())


@given(st.dictionaries(st.integers(0, 100), st.floats(0, 10), min_size=1), st.integers(0, 200))
def test_a_schedule_is_linear_between_its_points_and_constant_outside(points, step):
    ordered = sorted(points.items())
    schedule = Schedule.parse("it", [list(point) for point in ordered], 100)
    values = [value for _, value in ordered]
    assert all(math.isclose(schedule.factor(at), value) for at, value in ordered)
    assert min(values) <= schedule.factor(step) + 1e-9
    assert schedule.factor(step) <= max(values) + 1e-9
    if step >= ordered[-1][0]:
        assert schedule.factor(step) == values[-1]
    if step <= ordered[0][0]:
        assert schedule.factor(step) == values[0]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([[0, 1.0], [101, 0.0]], "ends at step 101, after the run"),
        ([[5, 1.0], [5, 0.0]], "each point's step must be larger"),
        ([[0, -1.0]], "factor=-1.0 must be a finite number of at least 0"),
        ([[0, float("nan")]], "factor=nan must be a finite number"),
        ([[0.5, 1.0]], "must be null or a list of points"),
        ([[0]], "must be null or a list of points"),
        ([], "must be null or a list of points"),
        ("linear", "must be null or a list of points"),
        ([[-1, 1.0]], "must be null or a list of points"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(value, says):
    with pytest.raises(UserError, match=says):
        Schedule.parse("balancing.lbl.schedule", value, max_steps=100)


def test_a_key_that_a_strategy_does_not_take_is_refused():
    with pytest.raises(UserError, match="balancing.simbal.colour.*balancing.simbal.coef"):
        strategy("simbal", colour="red")


def test_logits_without_a_spread_are_refused():
    with pytest.raises(UserError, match=r"^balancing\.logit_norm\.scale=0 must be above 0: "):
        strategy("logit_norm", scale=0)


def test_a_strategys_refusal_names_the_key():
    group = {"lbl": STRATEGIES["lbl"] | {"scope": "world"}}
    with pytest.raises(UserError, match=r"balancing\.lbl\.scope=world is not one of sequence, micro, global"):
        build_balancing(group, {**SIZES, "seed": 0}, 100, "sum")
