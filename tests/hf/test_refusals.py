"""Strategies and models that cannot be attached are refused before the model is changed."""

import pytest
import torch

from simbal.balancing import (
    ErnieOrthogonalLoss,
    ExpertRouterCoupling,
    FrozenRouter,
    HashRouting,
    LoadBalancingLoss,
    LossFree,
    OrthogonalInit,
    OrthogonalMixture,
    OrthogonalParametrization,
    PrototypeRouter,
    QuantileBalancing,
    SimBal,
)
from simbal.errors import UserError
from simbal.hf import attach
from tests.hf.architectures import E, batch, host, padded
from tests.hf.test_hooks import hooks


@pytest.mark.parametrize(
    ("strategies", "part"),
    [
        (OrthogonalInit(), "OrthogonalInit cannot be attached: .*orthogonal_"),
        ({"param": OrthogonalParametrization()}, "param cannot be attached: .*parametrizes"),
        (OrthogonalMixture(), "OrthogonalMixture cannot be attached: .*parametrizes"),
        (FrozenRouter(), "FrozenRouter cannot be attached: .*requires_grad_"),
        (ExpertRouterCoupling(), "ExpertRouterCoupling cannot be attached: .*experts' weights"),
        (PrototypeRouter(), "PrototypeRouter cannot be attached: .*logits"),
        ([LossFree(), HashRouting()], "LossFree and HashRouting"),
        ([SimBal(0.1), SimBal(0.2)], "need names"),
        (SimBal, "is not an instance of simbal.balancing.Balancing"),
        ({"simbal": 0.1}, "simbal: 0.1 is not an instance"),
        (LossFree(2, 8), "LossFree: .*num_layers=2"),
    ],
)
def test_unsuitable_strategies_are_refused(strategies, part):
    model = host()
    with pytest.raises(UserError, match=part):
        attach(model, strategies)
    assert not hooks(model)
    attach(model, SimBal()).detach()


@pytest.mark.parametrize("strategy", [LoadBalancingLoss(), QuantileBalancing()])
def test_a_model_in_which_every_token_uses_all_experts_is_refused(strategy):
    with pytest.raises(UserError, match="model.top_k equals model.num_experts"):
        attach(host(num_experts_per_tok=E), strategy)


def weigh_by_distance(logits_NE: torch.Tensor, top_k: int) -> tuple[torch.Tensor, ...]:
    weights_NK, experts_NK = (1 / (1 + logits_NE.square())).topk(top_k)
    return weights_NK / weights_NK.sum(-1, keepdim=True), experts_NK


def choose_next_expert(logits_NE: torch.Tensor, top_k: int) -> tuple[torch.Tensor, ...]:
    weights_NK, experts_NK = logits_NE.softmax(-1).topk(top_k)
    return weights_NK / weights_NK.sum(-1, keepdim=True), (experts_NK + 1) % E


@pytest.mark.parametrize("decide", [weigh_by_distance, choose_next_expert])
def test_a_router_with_an_unknown_rule_is_refused(decide):
    model = host()
    router = model.model.layers[1].mlp.gate
    router.forward = lambda x_ND: (x_ND @ router.weight.T, *decide(x_ND @ router.weight.T, router.top_k))
    with pytest.raises(UserError, match=r"layers.1.mlp.gate, a MixtralTopKRouter, follows none of the rules"):
        attach(model, LossFree())


def test_routers_of_different_sizes_are_refused():
    model = host()
    model.model.layers[1].mlp.gate.top_k = 3
    with pytest.raises(UserError, match="differ in number of experts"):
        attach(model, SimBal())


@pytest.mark.parametrize("strategy", [SimBal(), ErnieOrthogonalLoss(decoupled=True)])
def test_a_loss_on_frozen_routers_is_refused(strategy):
    model = host()
    model.requires_grad_(False)
    with pytest.raises(UserError, match="frozen: set requires_grad"):
        attach(model, strategy)
    attach(model, LossFree()).detach()


def test_attaching_twice_is_refused():
    model = host()
    with attach(model, LossFree(update_rate=1.0)) as balancing:
        model(**batch())
        balancing.step()  # now the bias changes the choice
        with pytest.raises(UserError, match="has strategies attached"):
            attach(model, SimBal())
    attach(model, SimBal()).detach()


def test_a_loss_or_a_step_without_a_forward_pass_is_refused():
    model = host()
    with attach(model, LossFree()) as balancing:
        with pytest.raises(UserError, match="call the model first"):
            balancing.loss()
        model.eval()
        model(**batch())
        with pytest.raises(UserError, match=r"call model.train\(\)"):
            balancing.step()


def test_a_loss_per_sequence_with_padding_is_refused():
    model = host()
    with attach(model, LoadBalancingLoss(scope="sequence")) as balancing:
        model(**padded())
        with pytest.raises(UserError, match="padding"):
            balancing.loss()
