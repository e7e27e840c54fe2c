"""Our losses are those of packages that others wrote, up to the documented factor."""

import warnings

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as mixtral_loss
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func as olmoe_loss

from simbal.balancing.lbl import LoadBalancingLoss, PooledLoadBalancingLoss, RouterZLoss
from tests.balancing.example import routing_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # beartype about the style of its type hints
    from st_moe_pytorch.st_moe_pytorch import TopNGating

L, B, S, E, K = 3, 2, 10, 6, 2


def logits_of(layer: int) -> torch.Tensor:
    return torch.randn(B * S, E, generator=torch.Generator().manual_seed(layer)) + torch.linspace(1, -1, E) * layer


@pytest.mark.parametrize("public", [mixtral_loss, olmoe_loss])
def test_the_pooled_loss_is_that_of_transformers_with_its_gradient(public):
    logits_LNE = torch.stack([logits_of(layer) for layer in range(L)]).requires_grad_()
    theirs = public(tuple(logits_LNE), E, K)
    ours = PooledLoadBalancingLoss(1.0).losses([routing_of(logits_NE, B, K) for logits_NE in logits_LNE], None).mean()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, logits_LNE), torch.autograd.grad(theirs, logits_LNE))


@pytest.mark.parametrize("public", [mixtral_loss, olmoe_loss])
def test_one_layer_of_transformers_is_equation_3_over_the_batch_and_k_times_the_olmoe_convention(public):
    logits_NE = logits_of(1)
    routing, theirs = routing_of(logits_NE, B, K), public((logits_NE,), E, K)
    over_batch = LoadBalancingLoss(1.0, "dense", "micro", "E", "unbiased", None).loss(routing)
    olmoe = LoadBalancingLoss(1.0, "dense", "micro", "E/K", "unbiased", "mean").loss(routing)
    torch.testing.assert_close(over_batch, theirs)
    torch.testing.assert_close(K * olmoe, theirs)


def st_moe(x_BSD: torch.Tensor, weight_ED: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gating = TopNGating(weight_ED.shape[1], E, top_n=2, capacity_factor_train=E, threshold_train=0.0)
    gating.to_gates.weight.data.copy_(weight_ED)
    _, _, balance_loss, router_z_loss = gating(x_BSD)
    return balance_loss, router_z_loss


def test_the_losses_of_st_moe_are_equation_3_for_the_first_choice_alone_and_our_router_z_loss():
    generator = torch.Generator().manual_seed(0)
    x_BSD, weight_ED = torch.randn(B, S, 8, generator=generator), torch.randn(E, 8, generator=generator)
    balance_loss, router_z_loss = st_moe(x_BSD, weight_ED)
    logits_NE = x_BSD.flatten(0, 1) @ weight_ED.T
    first_choice = LoadBalancingLoss(1.0, "dense", "sequence", "E", "unbiased", None)
    torch.testing.assert_close(first_choice.loss(routing_of(logits_NE, B, K=1)), balance_loss)
    torch.testing.assert_close(RouterZLoss(1.0).loss(routing_of(logits_NE, B)), router_z_loss)


def test_the_router_z_loss_of_known_logits():
    loss = RouterZLoss(1.0).loss(routing_of(torch.tensor([[1.0, 2.0, 3.0]]).log(), 1))
    assert loss.item() == pytest.approx(3.210402, abs=1e-6)
