"""Strategies by layer: a strategy with a selection acts in its layers only, as in a model that has no others."""

import pytest
import torch

from simbal.balancing.composition import build_balancing
from simbal.config.layers import selected_layers
from simbal.conformance import FACTS, SIZES, composed_module, outcome, same, tiny_model, train
from simbal.errors import UserError
from simbal.model.init import initialize
from simbal.report.arms import label_columns, label_of, short_label
from simbal.runs.folder import RunFolder
from simbal.training.record import describe_objective
from simbal.training.run import train as train_run
from tests.balancing.cases import registered
from tests.balancing.example import candidates, example, mirrored
from tests.training.run_files import assert_same_run, train_until

KEYS = registered()


def in_layers(**layers):
    """The strategies of the given names, each with its keys: `lf={"first": 1}`."""
    return build_balancing({name: KEYS[name] | keys for name, keys in layers.items()}, FACTS, 100, "sum")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"layers": None, "first": None}, None),
        ({"layers": [2, 0]}, (0, 2)),
        ({"first": 3}, (0, 1, 2)),
        ({"first": 4}, (0, 1, 2, 3)),
        ({"after": 3}, (3,)),
    ],
)
def test_layers_are_a_list_the_first_ones_or_the_rest(keys, expected):
    assert selected_layers("balancing.lf.", keys, 4) == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"first": 1, "after": 1}, "balancing.lf.first and after both select layers"),
        ({"first": 0}, "balancing.lf.first=0 must be a whole number of at least 1"),
        ({"first": 5}, "balancing.lf.first=5 must be at most 4"),
        ({"after": 4}, "balancing.lf.after=4 must be at most 3"),
        ({"layers": [0, 0]}, "layers=.* must be different numbers from 0 to 3"),
        ({"layers": [4]}, "layers=.* must be different numbers from 0 to 3"),
        ({"layers": []}, "layers=.* must be a list of layers"),
        ({"layers": [True]}, "layers=.* must be a list of layers"),
        ({"layers": 1}, "layers=1 must be a list of layers"),
    ],
)
def test_layers_that_the_model_does_not_have_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        selected_layers("balancing.lf.", keys, 4)


def test_strategies_that_do_the_same_may_act_in_different_layers_but_not_in_one():
    assert in_layers(hash={"first": 1}, lf={"after": 1}).choosers == ["hash", "lf"]
    for keys in ({"layers": [1, 0]}, {}):
        with pytest.raises(UserError, match="hash and lf both choose .* in a layer"):
            in_layers(hash={"first": 1}, lf=keys)


def test_a_bias_in_one_layer_has_its_state_and_leaves_the_choice_of_other_layers_alone():
    balancing = in_layers(lf={"layers": [1], "update_rate": 0.5})
    balancing.prepare(tiny_model().routers)
    assert balancing.parts["lf"].bias_LE.shape == (1, SIZES["num_experts"])
    counts_LE = torch.tensor([[6, 0, 0, 0, 0, 0]])
    balancing.update({"lf": counts_LE}, 1, [torch.zeros(6, 16)] * 2, 0.1, 0)
    bias_E = torch.tensor([-0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
    plain, biased = (candidates(torch.zeros(4, 6), layer=layer) for layer in (0, 1))
    assert balancing.choice_scores(plain) is plain.logits_NE
    assert torch.equal(balancing.choice_scores(biased), bias_E.expand(4, 6))


@pytest.mark.parametrize("scope", ["sequence", "global"])
def test_a_loss_in_some_layers_is_the_loss_of_a_model_with_these_layers(scope):
    _, routing = example()
    routings = [routing, mirrored(mirrored(routing))]
    some, every = (in_layers(lbl=keys | {"scope": scope}) for keys in ({"layers": [1]}, {}))
    assert some.measure(routings)["lbl"].shape[0] == 1
    alone = some.losses(routings, 0, some.measure(routings))["lbl"]
    assert torch.equal(alone, every.losses(routings[1:], 0, every.measure(routings[1:]))["lbl"])
    assert alone < every.losses(routings, 0, every.measure(routings))["lbl"]


def test_the_number_of_experts_varies_and_logits_are_adjusted_in_the_selected_layer_only():
    balancing = in_layers(expert_threshold={"first": 1}, lf={"after": 1}, logit_norm={"layers": [1]})
    module = composed_module(balancing)
    _, (first, second) = module.model(torch.arange(16).view(2, 8), balancing)
    assert (first.ragged, second.ragged) == (True, False)
    assert second.topk_experts_NK.shape == (16, 2)
    torch.testing.assert_close(second.logits_NE.square().mean(1), torch.ones(16))
    assert (first.logits_NE.square().mean(1) - 1).abs().max() > 0.1


@pytest.mark.parametrize("losses", [{}, {"lbl": {"after": 1, "scope": "global"}, "ernie_ortho": {"first": 1}}])
def test_different_strategies_in_each_layer_resume_from_a_state_dict_to_the_same_bits(losses):
    def new():
        chosen = {"emo": {"first": 1}, "quantile": {"after": 1, "estimator": "histogram"}}
        return composed_module(in_layers(**chosen, **losses))

    module, restored = new(), new()
    train(module, range(2), micro_batches=2)
    restored.load_state_dict(module.state_dict())
    for each in (module, restored):
        train(each, range(2, 3), micro_batches=2)
    assert same(outcome(module), outcome(restored), exactly=True)
    assert not same(outcome(module), outcome(new()))


def test_a_frozen_router_and_orthonormal_rows_are_a_matter_of_the_layer():
    balancing = in_layers(frozen={"first": 1}, simbal={"layers": [1]})
    model = tiny_model()
    balancing.prepare(model.routers)
    assert [router.weight_ED.requires_grad for router in model.routers] == [False, True]
    with pytest.raises(UserError, match="simbal is a loss .* frozen"):
        in_layers(frozen={"first": 1}, simbal={"layers": [0]}).prepare(tiny_model().routers)
    balancing = in_layers(ortho_init={"layers": [1]})
    initialize(model, 0, 0.02, [balancing.router_init(layer) for layer in range(2)])
    first, second = (router.weight_ED @ router.weight_ED.T for router in model.routers)
    torch.testing.assert_close(second, torch.eye(6))
    assert first.diag().max() < 0.1


def test_the_record_names_the_layers_and_the_coefficient_counts_them():
    module = composed_module(in_layers(hash={"first": 1}, simbal={"after": 1}, lbl={}))
    objective = describe_objective(module)
    assert (objective["hash"]["layers"], objective["simbal"]["layers"]) == ([0], [1])
    assert "layers" not in objective["lbl"]
    assert (objective["simbal"]["effective_coef"], objective["lbl"]["effective_coef"]) == (0.1, 0.01 * 2 * 2)


def test_a_selection_of_layers_can_be_given_for_any_strategy_although_no_file_has_the_key(check, small_spec):
    assert "++balancing.simbal.first=1" in check("balancing.simbal.first=1")
    assert "++balancing.simbal.layers=choice([0])" in check("-m", "balancing.simbal.layers=[0]")
    spec = small_spec("balancing=deepseek_v4", "balancing.hash.first=1")
    keys = spec.config.balancing
    assert (keys["hash"]["first"], keys["lf"]["after"], keys["lf"]["bias_on"]) == (1, 1, "scores")
    with pytest.raises(UserError, match="balancing.hash.first=3 must be at most 2"):
        small_spec("balancing=deepseek_v4")


def test_a_table_tells_arms_apart_by_their_layers(small_spec):
    specs = [small_spec("balancing=lf"), small_spec("balancing=lf", "++balancing.lf.first=1")]
    assert [short_label(label_of(spec, label_columns(specs))) for spec in specs] == ["lf", "lf first=1"]


@pytest.mark.slow
def test_hash_routing_in_the_first_layer_and_a_bias_in_the_other_resume_to_the_same_bits(
    small_spec, tmp_path, monkeypatch, capsys
):
    keys = ["balancing=deepseek_v4", "balancing.hash.first=1", "balancing.hash.table=balanced", "router=sigmoid"]
    reference, killed = (small_spec(*keys, "trainer.max_steps=7", output_dir=tmp_path / name) for name in "ab")
    train_run(reference)
    assert "hash in layers 0: no loss" in capsys.readouterr().out
    assert RunFolder(reference.path).read_record()["objective"]["lf"]["layers"] == [1]
    train_until(monkeypatch, killed, 6)
    train_run(killed)
    assert_same_run(reference, killed)
