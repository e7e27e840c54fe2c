"""SimBal and the penalties on rows equal values worked out by hand."""

from dataclasses import replace

import pytest
import torch

from simbal.balancing.base import FinishedStep
from simbal.balancing.weight_losses import ErnieOrthogonalLoss, OffDiagonalCosine, RowNorm, SimBal
from simbal.conformance import LR, module_of, train
from simbal.errors import UserError
from simbal.model.router import Router
from tests.balancing.example import WEIGHT_ED, example


def simbal(weight_ED, reduction="sum", gram_dtype="fp32"):
    return SimBal(1.0, reduction, gram_dtype).loss(replace(example()[1], router_weight_ED=weight_ED))


def orthonormal_rows() -> torch.Tensor:
    return torch.linalg.qr(torch.randn(768, 32, generator=torch.Generator().manual_seed(0))).Q.T


def test_simbal_is_the_entrywise_sum_and_its_gradient_two_s_w():
    weight_ED = WEIGHT_ED.clone().requires_grad_()
    loss = simbal(weight_ED)
    assert loss.item() == pytest.approx(1.5)
    assert simbal(weight_ED, "mean").item() == pytest.approx(0.375)
    (gradient_ED,) = torch.autograd.grad(loss, weight_ED)
    assert gradient_ED.tolist() == [[2, 3, -1], [2, 3, -1]]


@pytest.mark.parametrize(("width", "start"), [(768, 31.0), (1536, 24.8)])
def test_simbal_from_a_normal_start_has_the_size_known_for_the_papers_routers(width, start):
    weight_ED = 0.02 * torch.randn(32, width, generator=torch.Generator().manual_seed(0))
    assert simbal(weight_ED).item() == pytest.approx(start, rel=0.02)


def test_simbal_vanishes_on_orthonormal_rows_in_fp32_and_acts_less_in_bf16():
    rows_ED = orthonormal_rows()
    assert simbal(rows_ED).item() < 1e-3
    near_ED = (rows_ED + 1e-5).requires_grad_()
    exact, rounded = (torch.autograd.grad(simbal(near_ED, "sum", dtype), near_ED)[0] for dtype in ("fp32", "bf16"))
    assert rounded.abs().sum() < exact.abs().sum()


def test_the_fp32_product_stays_fp32_under_autocast():
    rows_ED = orthonormal_rows()
    with torch.autocast("cpu", torch.bfloat16):
        assert (simbal(rows_ED, "mean")).item() < 5e-6


def test_the_penalties_have_their_values_on_the_example():
    routing = replace(example()[1], router_weight_ED=WEIGHT_ED)
    assert ErnieOrthogonalLoss(1.0, False, True).loss(routing).item() == pytest.approx(0.08)
    assert OffDiagonalCosine(1.0).loss(routing).item() == pytest.approx(0.16)
    assert RowNorm(1.0).loss(routing).item() == pytest.approx(0.0139320, abs=1e-7)


@pytest.mark.parametrize(("scale_by_lr", "rate"), [(True, LR), (False, 1.0)])
def test_the_decoupled_step_is_a_gradient_step_after_the_optimizers(scale_by_lr, rate):
    without, within = module_of(SimBal(0.0, "sum", "fp32")), module_of(ErnieOrthogonalLoss(1.0, True, scale_by_lr))
    for module in (without, within):
        train(module, range(1))
    for plain, stepped in zip(without.model.routers, within.model.routers, strict=True):
        weight_ED = plain.weight_ED.detach().clone().requires_grad_()
        loss = ErnieOrthogonalLoss(1.0, False, True).loss(replace(example()[1], router_weight_ED=weight_ED))
        (gradient_ED,) = torch.autograd.grad(loss, weight_ED)
        torch.testing.assert_close(stepped.weight_ED, weight_ED - rate * gradient_ED)


def test_the_decoupled_step_is_as_long_as_its_schedule_says():
    moved = []
    for factor in (1.0, 0.25):
        weight_ED = WEIGHT_ED.clone().requires_grad_()
        with torch.no_grad():
            ErnieOrthogonalLoss(1.0, True, True).update(FinishedStep(torch.zeros(1, 2), 1, [weight_ED], 0.1, factor))
        moved.append((weight_ED - WEIGHT_ED).detach())
    assert moved[0].abs().max() > 1e-3
    torch.testing.assert_close(moved[1], 0.25 * moved[0])


def test_more_experts_than_dimensions_are_warned_about(caplog):
    SimBal(1.0, "sum", "fp32").prepare([Router(4, 6, 2, "softmax", True, layer=0)])
    assert "6 rows cannot be orthonormal in 4 dimensions" in caplog.text


@pytest.mark.parametrize("coef", [-0.1, float("nan"), float("inf"), "much", True])
@pytest.mark.parametrize("make", [lambda coef: SimBal(coef, "sum", "fp32"), OffDiagonalCosine, RowNorm])
def test_a_coefficient_that_is_no_finite_number_of_at_least_zero_is_refused(coef, make):
    with pytest.raises(UserError, match="coef=.* must be a finite number of at least 0"):
        make(coef)
