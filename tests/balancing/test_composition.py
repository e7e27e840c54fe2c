"""A composition is the sum of its strategies, each with its own coefficient, schedule and class."""

import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.balancing.composition import Composition, build_balancing, build_strategy
from simbal.balancing.controls import NoBalancing
from simbal.balancing.weight_losses import SimBal
from simbal.config.schedule import Schedule
from simbal.conformance import FACTS, tiny_model
from simbal.errors import UserError
from simbal.model.router import Router
from tests.balancing.cases import registered
from tests.balancing.example import example, mirrored

STRATEGIES = registered()


def strategy(name: str, **changes):
    return build_strategy(name, STRATEGIES[name] | changes, FACTS)


def together(*names: str, layer_reduce: str = "sum", **schedules) -> Composition:
    return Composition({name: strategy(name) for name in names}, schedules, layer_reduce)


def test_losses_add_up_and_are_reduced_over_layers():
    _, routing = example()
    routings = [routing, mirrored(routing)]
    both = together("lbl", "simbal").losses(routings)
    assert both["lbl"].item() == pytest.approx(0.01 * 2 * 19 / 8)
    assert both["simbal"].item() == pytest.approx(0.1 * 2 * 1.5)
    mean = together("lbl", "simbal", layer_reduce="mean").losses(routings)
    assert mean["lbl"].item() == pytest.approx(0.01 * 19 / 8)


def test_the_router_starts_orthogonal_if_any_strategy_prefers_it():
    assert together("lbl", "simbal").router_init(0) == "orthogonal"
    assert together("lf", "lbl").router_init(0) == "normal"


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("lf", "quantile"), "choose a token's experts"),
        (("uniform", "hash"), "choose a token's experts"),
        (("prototype", "cosine"), "map hidden states to logits"),
        (("cosine", "temperature"), "map hidden states to logits"),
        (("prototype", "ortho_param"), "set the router's weight"),
        (("frozen", "ortho_mix"), "set the router's weight"),
    ],
)
def test_strategies_that_do_the_same_exclude_each_other(pair, message):
    with pytest.raises(UserError, match=f"{pair[0]} and {pair[1]} both {message}"):
        together(*pair)


@pytest.mark.parametrize("loss", ["simbal", "row_norm", "ernie_ortho"])
@pytest.mark.parametrize("setter", ["frozen", "prototype"])
def test_a_loss_on_a_frozen_weight_is_refused(loss, setter):
    parts = {loss: strategy(loss), setter: strategy(setter)}
    with pytest.raises(UserError, match=f"{loss} is a loss on the router's weight.*frozen"):
        Composition(dict(reversed(parts.items())), {}).prepare(tiny_model().routers)


def test_relu_gating_needs_remoe():
    with pytest.raises(UserError, match=r"router=relu .*balancing=remoe"):
        Composition({"none": NoBalancing()}, {}).prepare([Router(4, 4, 2, "relu", False, layer=0)])


def test_a_schedule_scales_the_loss_and_the_update_of_its_own_strategy_only():
    _, routing = example()
    half = together("lbl", "simbal", lbl=Schedule(((0, 1.0), (10, 0.0)))).losses([routing], step=5)
    full = together("lbl", "simbal").losses([routing], step=5)
    torch.testing.assert_close(half["lbl"], 0.5 * full["lbl"])
    assert torch.equal(half["simbal"], full["simbal"])
    balancing = together("lf", lf=Schedule(((0, 1.0), (10, 0.0))))
    balancing.prepare(tiny_model().routers)
    bias_LE = balancing.parts["lf"].bias_LE
    load_LE = torch.arange(float(bias_LE.numel())).view_as(bias_LE)
    balancing.update({"lf": load_LE}, 1, [], 0.1, step=5)
    half_LE = bias_LE.clone()
    balancing.update({"lf": load_LE}, 1, [], 0.1, step=0)
    torch.testing.assert_close(bias_LE, 3 * half_LE)
    assert half_LE.any()


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
    assert min(values) - 1e-9 <= schedule.factor(step) <= max(values) + 1e-9
    if step >= ordered[-1][0]:
        assert schedule.factor(step) == values[-1]
    if step <= ordered[0][0]:
        assert schedule.factor(step) == values[0]


@pytest.mark.parametrize(
    ("points", "names"),
    [
        ([[0, 1.0], [101, 0.0]], "step 101"),
        ([[5, 1.0], [5, 0.0]], "larger"),
        ([[0, -1.0]], "factor=-1.0"),
        ([[0.5, 1.0]], "list of points"),
        ([], "list of points"),
        ("linear", "list of points"),
        ([[-1, 1.0]], "list of points"),
    ],
)
def test_an_invalid_schedule_is_refused(points, names):
    with pytest.raises(UserError, match=f"balancing.lbl.schedule.*{names}"):
        Schedule.parse("balancing.lbl.schedule", points, max_steps=100)


def test_a_refusal_names_the_key_of_the_config_and_an_unknown_key_the_closest_one():
    with pytest.raises(UserError, match=r"balancing\.lbl\.scope=world .*sequence, micro, global"):
        build_balancing({"lbl": STRATEGIES["lbl"] | {"scope": "world"}}, FACTS, 100, "sum")
    with pytest.raises(UserError, match=r"balancing.simbal.color.*balancing.simbal.coef"):
        strategy("simbal", color="red")


@pytest.mark.parametrize(
    "target",
    ["os.system", "..simbal.balancing.weight_losses.SimBal", "", None, "tests.balancing.broken.GoodBias",
     "simbal.balancing.base.Properties", "simbal.training.run.train", "simbal.nowhere.SimBal"],
)  # fmt: skip
def test_the_config_of_a_run_folder_can_only_name_strategies(target):
    with pytest.raises(UserError, match=f"balancing.x: _target_={target} is not"):
        build_strategy("x", {"_target_": target}, FACTS, trusted=False)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """`package(entry_points)` installs the package paper_runs and returns a file that its import creates."""

    def install(entry_points=""):
        code = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\n"
        code += "from simbal.balancing.weight_losses import SimBal as Base\nclass SimBal(Base): pass\n"
        about = tmp_path / "paper_runs-1.dist-info"
        for folder in (tmp_path / "paper_runs", about):
            folder.mkdir()
        (tmp_path / "paper_runs" / "__init__.py").write_text(code)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: paper-runs\nVersion: 1\n")
        (about / "entry_points.txt").write_text(entry_points)
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path / "paper_runs" / "executed"

    yield install
    sys.modules.pop("paper_runs", None)


@pytest.mark.parametrize(
    "entry_points", ["", "[simbal.strategies]\nmine = paper_runs:Other\n", "[other.group]\nmine = paper_runs:SimBal\n"]
)
def test_a_run_folder_never_imports_a_class_that_is_not_an_entry_point(package, entry_points):
    executed = package(entry_points)
    with pytest.raises(UserError, match=r"_target_=paper_runs.SimBal is not allowed.*entry point"):
        build_strategy("simbal", {"_target_": "paper_runs.SimBal"}, FACTS, trusted=False)
    assert not executed.exists()


def test_a_users_own_config_names_any_class_and_a_run_folder_an_entry_point(package):
    executed = package("[simbal.strategies]\nmine = paper_runs:SimBal\n")
    for trusted in (True, False):
        assert isinstance(build_strategy("x", {"_target_": "paper_runs.SimBal"}, FACTS, trusted), SimBal)
    assert executed.exists()
