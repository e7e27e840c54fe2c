"""Callbacks: measurements that do not change a run, pruning, and warnings for successful runs."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from simbal.analysis.redundancy import redundancy
from simbal.analysis.trained import load
from simbal.balancing.composition import Composition
from simbal.balancing.controls import FrozenRouter
from simbal.balancing.lbl import LoadBalancingLoss
from simbal.balancing.step import StepInProgress
from simbal.balancing.weight_losses import SimBal
from simbal.conformance import LR, B, S, batch_of, composed_module, tiny_module
from simbal.runs.folder import PRUNE_FILE, RunFolder
from simbal.training.callbacks import MetricsLogger
from simbal.training.run import train
from simbal.training.warnings import DeviceChanges
from tests.balancing.cases import CASES
from tests.training.run_files import assert_same_run, assert_same_weights, rows, train_until, without_speed

PES_KEYS = ("val/min_pes", "val/mean_pes", "layers")
WITH_LOSS = [case for case in CASES if case.make().properties.differentiable]


def warnings_of(spec) -> list[str]:
    return RunFolder(spec.path).read_record()["warnings"]


def without_measurements(spec) -> list[dict]:
    """The rows without PES and the gradient of the auxiliary losses."""
    kept = []
    for row in without_speed(spec):
        dropped = ("train/aux_grad_norm", *(PES_KEYS if "val/min_pes" in row else ()))
        kept.append({key: value for key, value in row.items() if key not in dropped})
    return [row for row in kept if row.keys() != {"step", "tokens"}]


@pytest.mark.parametrize("balancing", ["[lf,lbl,simbal]", "uniform", "ortho_param"])
def test_measuring_pes_and_the_auxiliary_gradient_changes_no_bit(small_spec, tmp_path, monkeypatch, balancing):
    keys = (f"balancing={balancing}", "trainer.micro_batch=4", "trainer.log_every=1", "trainer.max_steps=6")
    plain, measured = (
        small_spec(*keys, f"trainer.pes_every={every}", "trainer.pes_tokens=40", output_dir=tmp_path / str(every))
        for every in (0, 3)
    )
    states = []
    for spec in (measured, plain):
        torch.manual_seed(0)
        train(spec)
        states.append(torch.get_rng_state())
        monkeypatch.setattr(MetricsLogger, "setup", lambda *_, **__: None)  # the plain run measures no gradient
    assert torch.equal(*states)
    assert without_measurements(measured) == without_speed(plain)
    assert without_measurements(measured) != without_speed(measured)
    assert_same_weights(measured, plain)


def test_pes_rows_hold_every_layer_also_after_a_kill(small_spec, finished, monkeypatch):
    keys = ("trainer.pes_every=3", "trainer.pes_tokens=512")
    spec, killed = finished(*keys), small_spec(*keys)
    measured = rows(spec, "val/min_pes")
    assert [row["step"] for row in measured] == [0, 3, 6, 9, 12]
    assert [row["tokens"] for row in measured] == [0, 384, 768, 1152, 1536]
    assert ["train/loss" in row for row in measured] == [False, False, True, False, True]  # every second is logged
    for row in measured:
        assert row["val/min_pes"] == min(row["layers"]["val/pes"])
        assert row["val/mean_pes"] == pytest.approx(sum(row["layers"]["val/pes"]) / 2)
    for step in (1, 7):
        train_until(monkeypatch, killed, step)
    train(killed)
    assert without_speed(spec) == without_speed(killed)


def test_the_recorded_pes_is_what_the_analysis_finds(finished):
    trained = load(finished("trainer.pes_every=3", "trainer.pes_tokens=512").path, "cpu")
    found = redundancy(trained, tokens=None, batch_size=8).record["metrics"]
    assert trained.record["metrics"]["val/min_pes"] == pytest.approx(found["min_pes"])
    assert trained.record["metrics"]["val/mean_pes"] == pytest.approx(found["mean_pes"])
    assert "val/min_pes" in trained.record["definitions"]
    assert len(trained.record["layers"]["val/pes"]) == 2


@pytest.mark.parametrize("case", WITH_LOSS, ids=str)
def test_the_auxiliary_gradient_of_the_last_layer_is_the_gradient_of_the_whole_graph(case):
    """Its input depends on no other router that the loss could reach, so holding it fixed changes nothing."""
    module, window_BT = tiny_module(case), batch_of(0)
    module.measures_aux_gradient = lambda number: True
    module.training_step(window_BT, 0)
    (measured_LED,) = module._aux_gradients
    _, routings = module(window_BT[:, :-1], window_BT[:, 1:])
    step = StepInProgress(module.balancing)
    step.add(routings)
    (loss,) = step.losses(routings, 0).values()
    (expected_ED,) = torch.autograd.grad(loss, routings[-1].router_weight_ED, materialize_grads=True)
    torch.testing.assert_close(measured_LED[-1], expected_ED)


def test_the_auxiliary_gradient_norm_of_two_losses_and_micro_batches_agrees_with_closed_forms():
    module = composed_module(Composition({"simbal": SimBal(), "lbl": LoadBalancingLoss()}, {}))
    module.measures_aux_gradient = lambda number: True
    for router in module.model.routers:
        router.keeps_input = True
    expected = []
    for rows_BT in batch_of(0).split(B // 2):
        module.training_step(rows_BT, 0)
        _, routings = module(rows_BT[:, :-1], rows_BT[:, 1:])
        layers = []
        for routing in routings:
            weight_ED = routing.router_weight_ED
            p_BSE, chosen_BSE = routing.probs_NE.view(B // 2, S, -1), torch.zeros_like(routing.probs_NE)
            f_BE = chosen_BSE.scatter(1, routing.topk_experts_NK, 1).view(B // 2, S, -1).mean(1)
            slope_BSE = len(weight_ED) / (B * S / 2) * p_BSE
            slope_BSE = slope_BSE * (f_BE[:, None] - (f_BE[:, None] * p_BSE).sum(-1, keepdim=True))
            sign_EE = (weight_ED @ weight_ED.T - torch.eye(len(weight_ED))).sign()
            layers.append(0.01 * slope_BSE.flatten(0, 1).T @ routing.x_ND + 2 * 0.1 * sign_EE @ weight_ED)
        expected.append(torch.stack(layers))
    expected_norm = torch.stack(expected).mean(0).norm()
    torch.testing.assert_close(module.finish_step(0, LR).aux_grad_norm, expected_norm, rtol=1e-5, atol=0)


def test_the_logged_norms_agree_with_clipping_and_the_bound_of_simbal(finished):
    spec = finished("balancing=simbal", "optim.grad_clip=0.5")
    E, L = spec.config.model.num_experts, spec.config.model.num_layers
    logged = rows(spec, "train/clipped")
    for row in logged:
        assert 0 < row["train/aux_grad_norm"] < 1.1 * 2 * 0.1 * E * math.sqrt(L)  # |S W| <= |S| = E if |W| = 1
        assert row["train/clipped"] == pytest.approx(min(1, 0.5 / row["train/grad_norm"]), rel=1e-5)
    assert min(row["train/clipped"] for row in logged) < 1
    assert {row["train/clipped"] for row in rows(finished("balancing=simbal"), "train/clipped")} == {1}


def test_the_auxiliary_gradient_of_a_frozen_layer_is_zero():
    module = composed_module(
        Composition({"lbl": LoadBalancingLoss(), "frozen": FrozenRouter()}, {}, "sum", {"frozen": [0]})
    )
    module.balancing.prepare(module.model.routers)
    module.measures_aux_gradient = lambda number: True
    module.training_step(batch_of(0), 0)
    (measured_LED,) = module._aux_gradients
    assert [bool(gradient_ED.any()) for gradient_ED in measured_LED] == [False, True]


@pytest.mark.parametrize("keys", [("balancing=lf",), ("balancing=[frozen,lbl]",)])
def test_there_is_no_auxiliary_gradient_without_a_loss_or_a_trained_router(finished, keys):
    assert not rows(finished(*keys), "train/aux_grad_norm")


@pytest.mark.parametrize(("keys", "warned"), [(("optim.grad_clip=1",), True), ((), False)])
def test_overclipping_causes_a_warning(small_spec, keys, warned, capsys):
    """At a coefficient of 10, the gradient of SimBal has the norm 2 coef E sqrt(L) = 113."""
    spec = small_spec("balancing=simbal", "balancing.simbal.coef=10", *keys)
    train(spec)
    assert ["optim.grad_clip=1" in warning and " 113 " in warning for warning in warnings_of(spec)] == [True] * warned
    printed = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert printed == [f"warning: {warning}" for warning in warnings_of(spec)]


@pytest.mark.parametrize(
    ("keys", "count", "named"),
    [
        (("trainer.precision=bf16-true", "optim.lr=0.0005"), 5, "norm"),
        (("trainer.precision=bf16-true", "optim.lr=1e-9", "optim.weight_decay=0"), 16, "blocks.0"),
        (("trainer.precision=bf16-true", "optim.lr=0.02"), 0, ""),
        (("trainer.precision=bf16-mixed", "optim.lr=0.0005"), 0, ""),
        (("optim.lr=1e-6",), 0, ""),
    ],
)
def test_bf16_weights_that_do_not_change_cause_a_warning(small_spec, keys, count, named):
    spec = small_spec("trainer.force_precision=true", "optim.warmup_steps=0", *keys)
    train(spec)
    warnings, log = warnings_of(spec), (spec.path / "train.log").read_text()
    assert [warning.partition(" of ")[0] for warning in warnings] == ([str(count)] if count else [])
    assert all(named in warning and "trainer.precision=bf16-mixed" in warning for warning in warnings)
    assert all(f"WARNING {warning}" in log for warning in warnings)


def test_a_pruned_run_stops_before_its_next_batch_and_can_be_finished_later(small_spec, finished, monkeypatch):
    spec, original = small_spec(), MetricsLogger.log_validation
    spec.path.mkdir(parents=True)
    file = spec.path / PRUNE_FILE
    file.write_text(json.dumps({"reason": "left by an earlier sweep"}))

    def log_and_prune(logger, module, step):
        original(logger, module, step)
        if step == 6:
            file.write_text(json.dumps({"reason": "pruned by trial 3"}))

    with monkeypatch.context() as patch:
        patch.setattr(MetricsLogger, "log_validation", log_and_prune)
        train(spec)
    record = RunFolder(spec.path).read_record()
    assert (record["status"], record["config_hash"]) == ("pruned", spec.hash)
    assert record["error"] == "pruned by trial 3; stopped at step 6"
    assert rows(spec)[-1]["step"] == 6
    train(spec)
    assert_same_run(spec, finished())


def test_a_change_of_precision_causes_a_warning():
    first, second = DeviceChanges(), DeviceChanges()
    for step in (0, 3):
        first.on_train_start(SimpleNamespace(global_step=step, precision="32-true"))
    assert first.warnings == []
    second.load_state_dict(first.state_dict())
    second.on_train_start(SimpleNamespace(global_step=5, precision="bf16-mixed"))
    (warning,) = second.warnings
    assert "32-true from step 0, bf16-mixed from step 5" in warning
