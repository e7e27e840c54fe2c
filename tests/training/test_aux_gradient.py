"""The gradient of the auxiliary losses by the routers' weights: what it is, and that to measure it changes nothing."""

import math

import pytest
import torch

from simbal.balancing.composition import Composition
from simbal.balancing.lbl import LoadBalancingLoss
from simbal.balancing.step import StepInProgress
from simbal.balancing.weight_losses import SimBal
from simbal.conformance import LR, B, S, batch_of, composed_module, tiny_module
from simbal.training.run import train
from simbal.training.telemetry import Telemetry
from tests.balancing.cases import CASES
from tests.training.run_files import rows, weights, without_speed

WITH_LOSS = [case for case in CASES if case.make().properties.differentiable]


class Asking:
    """An observer that wants the gradient of every step."""

    def wants_aux_gradient(self, number):
        return True


def asked(module):
    module.observers.append(Asking())
    return module


@pytest.mark.parametrize("case", WITH_LOSS, ids=str)
def test_in_the_last_layer_it_is_that_of_the_whole_graph(case):
    """No loss reaches the last router by the hidden states of a later layer, so that nothing is held fixed there."""
    module, window_BT = asked(tiny_module(case)), batch_of(0)
    module.training_step(window_BT, 0)
    (measured_LED,) = module._aux_gradients
    _, routings = module(window_BT[:, :-1], window_BT[:, 1:])
    alone = StepInProgress(module.balancing)
    alone.add(routings)
    (loss,) = alone.losses(routings, 0).values()
    (whole_ED,) = torch.autograd.grad(loss, routings[-1].router_weight_ED, materialize_grads=True)
    torch.testing.assert_close(measured_LED[-1], whole_ED)


def test_of_several_losses_and_micro_batches_it_is_the_norm_of_their_mean():
    module = asked(composed_module(Composition({"simbal": SimBal(), "lbl": LoadBalancingLoss()}, {})))
    for router in module.model.routers:
        router.keeps_input = True
    by_hand = []
    for rows_BT in batch_of(0).split(B // 2):
        module.training_step(rows_BT, 0)
        _, routings = module(rows_BT[:, :-1], rows_BT[:, 1:])
        of_each = []
        for routing in routings:
            weight_ED = routing.router_weight_ED
            p_BSE, chosen_BSE = routing.probs_NE.view(B // 2, S, -1), torch.zeros_like(routing.probs_NE)
            f_BE = chosen_BSE.scatter(1, routing.topk_experts_NK, 1).view(B // 2, S, -1).mean(1)
            slope_BSE = len(weight_ED) / (B * S / 2) * p_BSE
            slope_BSE = slope_BSE * (f_BE[:, None] - (f_BE[:, None] * p_BSE).sum(-1, keepdim=True))
            sign_EE = (weight_ED @ weight_ED.T - torch.eye(len(weight_ED))).sign()
            of_each.append(0.01 * slope_BSE.flatten(0, 1).T @ routing.x_ND + 2 * 0.1 * sign_EE @ weight_ED)
        by_hand.append(torch.stack(of_each))
    wanted = torch.stack(by_hand).mean(0).norm()
    torch.testing.assert_close(module.finish_step(0, LR).aux_grad_norm, wanted, rtol=1e-5, atol=0)


def test_to_measure_it_changes_not_a_bit_of_the_run(small_spec, tmp_path, monkeypatch):
    keys = ("balancing=[lf,lbl,simbal]", "trainer.micro_batch=4", "trainer.log_every=1")
    watched, blind = (small_spec(*keys, output_dir=tmp_path / name) for name in ("watched", "blind"))
    train(watched)
    monkeypatch.setattr(Telemetry, "wants_aux_gradient", lambda self, number: False)
    train(blind)
    seen = [
        {key: value for key, value in row.items() if key != "train/aux_grad_norm"} for row in without_speed(watched)
    ]
    assert seen == without_speed(blind)
    assert seen != without_speed(watched)
    other = weights(blind)
    assert all(torch.equal(tensor, other[name]) for name, tensor in weights(watched).items())


def test_of_simbal_at_orthonormal_rows_it_is_as_long_as_its_closed_form_can_make_it(finished):
    spec = finished("balancing=simbal", "optim.grad_clip=0.5")
    E, L = spec.config.model.num_experts, spec.config.model.num_layers
    logged = [row for row in rows(spec) if "train/clipped" in row]
    assert len(logged) > 3
    for row in logged:
        assert 0 < row["train/aux_grad_norm"] < 1.1 * 2 * 0.1 * E * math.sqrt(L)  # |S W| <= |S| = E if |W| = 1
        assert row["train/clipped"] == pytest.approx(min(1, 0.5 / row["train/grad_norm"]), rel=1e-5)
    assert min(row["train/clipped"] for row in logged) < 1


@pytest.mark.parametrize("keys", [("balancing=lf",), ("balancing=[frozen,lbl]",)])
def test_without_a_loss_or_a_trained_router_there_is_none(finished, keys):
    assert not any("train/aux_grad_norm" in row for row in rows(finished(*keys)))


def test_without_a_bound_nothing_is_clipped(finished):
    logged = [
        row["train/clipped"] for row in rows(finished("balancing=simbal", "optim.grad_clip=0")) if "train/ce" in row
    ]
    assert set(logged) == {1}
