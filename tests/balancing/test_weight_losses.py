"""Losses of router rows and expert weights equal values computed by hand."""

from dataclasses import replace

import pytest
import torch

from simbal.balancing.weight_losses import ErnieOrthogonalLoss, ExpertOverlap, OffDiagonalCosine, RowNorm, SimBal
from simbal.conformance import LR, Case, tiny_module, train
from simbal.model.router import ExpertWeights, Router, Routing
from tests.balancing.example import WEIGHT_ED, example, finished


def orthonormal_rows() -> torch.Tensor:
    return torch.linalg.qr(torch.randn(768, 32, generator=torch.Generator().manual_seed(0))).Q.T


def test_simbal_is_the_entrywise_sum_with_gradient_2_s_w():
    weight_ED = WEIGHT_ED.clone().requires_grad_()
    loss = SimBal(1.0).of_weight(weight_ED)
    assert loss.item() == pytest.approx(1.5)
    assert SimBal(1.0, "mean").of_weight(weight_ED).item() == pytest.approx(0.375)
    assert torch.autograd.grad(loss, weight_ED)[0].tolist() == [[2, 3, -1], [2, 3, -1]]


@pytest.mark.parametrize(("width", "start"), [(768, 31.0), (1536, 24.8)])
def test_simbal_of_a_normal_initialization_has_its_known_value_for_the_papers_routers(width, start):
    weight_ED = 0.02 * torch.randn(32, width, generator=torch.Generator().manual_seed(0))
    assert SimBal(1.0).of_weight(weight_ED).item() == pytest.approx(start, rel=0.02)


def test_simbal_vanishes_on_orthonormal_rows_in_fp32_also_under_autocast_and_has_a_smaller_gradient_in_bf16():
    rows_ED = orthonormal_rows()
    with torch.autocast("cpu", torch.bfloat16):
        assert SimBal(1.0).of_weight(rows_ED).item() < 1e-3
    near_ED = (rows_ED + 1e-5).requires_grad_()
    losses = [SimBal(1.0, "sum", dtype).of_weight(near_ED) for dtype in ("fp32", "bf16")]
    exact, rounded = (torch.autograd.grad(loss, near_ED)[0].abs().sum() for loss in losses)
    assert rounded < exact


@pytest.mark.parametrize(
    ("make", "value"), [(SimBal, 1.5), (ErnieOrthogonalLoss, 0.08), (OffDiagonalCosine, 0.16), (RowNorm, 0.0139320)]
)
def test_losses_of_a_weight_and_of_a_routing_have_their_values_on_the_example(make, value):
    routing = Routing.of_logits(torch.zeros(4, 2), 1, WEIGHT_ED)
    assert make(coef=2.0).of_weight(WEIGHT_ED).item() == pytest.approx(2 * value, abs=2e-7)
    assert make(coef=2.0).loss(routing).item() == pytest.approx(2 * value, abs=2e-7)


@pytest.mark.parametrize(("scale_by_lr", "rate"), [(True, LR), (False, 1.0)])
def test_the_decoupled_step_is_a_gradient_step_after_the_optimizers(scale_by_lr, rate):
    makes = (lambda: SimBal(0.0), lambda: ErnieOrthogonalLoss(1.0, True, scale_by_lr))
    without, within = (tiny_module(Case("it", make)) for make in makes)
    for module in (without, within):
        train(module, range(1))
    for plain, stepped in zip(without.model.routers, within.model.routers, strict=True):
        weight_ED = plain.weight_ED.detach().clone().requires_grad_()
        (gradient_ED,) = torch.autograd.grad(ErnieOrthogonalLoss(1.0).of_weight(weight_ED), weight_ED)
        torch.testing.assert_close(stepped.weight_ED, weight_ED - rate * gradient_ED)
    sets_weight = [module.balancing.parts["it"].sets_router_weight for module in (without, within)]
    assert sets_weight == [False, True]


def test_the_schedule_scales_the_decoupled_step():
    moved = []
    for factor in (1.0, 0.25):
        weight_ED = WEIGHT_ED.clone().requires_grad_()
        with torch.no_grad():
            ErnieOrthogonalLoss(1.0, True).update(finished([[0, 0]], factor=factor, weights=[weight_ED]))
        moved.append((weight_ED - WEIGHT_ED).detach())
    assert moved[0].abs().max() > 1e-3
    torch.testing.assert_close(moved[1], 0.25 * moved[0])


def test_more_experts_than_dimensions_cause_a_warning(caplog):
    SimBal().prepare([Router(4, 6, 2, "softmax", True, layer=0)])
    assert "6 rows cannot be orthonormal in 4 dimensions" in caplog.text


def test_the_overlap_of_three_experts_worked_out_by_hand():
    # (gate, up, down), one number each: the cosines are 2/7, 0 and 6/7
    numbers_EP = torch.tensor([[1.0, 0.0, 0.0], [2.0, 3.0, 6.0], [0.0, 0.0, 5.0]])
    experts = ExpertWeights(numbers_EP[:, :2].view(3, 2, 1, 1), numbers_EP[:, 2:].view(3, 1, 1))
    loss = ExpertOverlap(coef=2.0).loss(replace(example()[1], experts=experts))
    assert loss.item() == pytest.approx(2 * (4 + 36) / 49 / 3)
