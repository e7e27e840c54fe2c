"""What cannot be attached is refused in one sentence, before the model is touched."""

import pytest
import torch

from simbal.balancing import (
    ErnieOrthogonalLoss,
    ExpertOverlap,
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
from tests.hf.models import E, batch, host, padded
from tests.hf.test_hooks import hooks


@pytest.mark.parametrize(
    ("strategies", "sentence"),
    [
        (OrthogonalInit(), "OrthogonalInit cannot be attached: it is only a start"),
        ({"param": OrthogonalParametrization()}, "param cannot be attached: it replaces the router's weight"),
        (FrozenRouter(), "FrozenRouter cannot be attached: it is no more than requires_grad"),
        (ExpertRouterCoupling(), "ExpertRouterCoupling cannot be attached: it looks at experts' weights"),
        (ExpertOverlap(), "ExpertOverlap cannot be attached: it looks at experts' weights"),
        (PrototypeRouter(), "PrototypeRouter cannot be attached: it takes the place of the product"),
        (OrthogonalMixture(), "OrthogonalMixture cannot be attached: it replaces the router's weight"),
        ([LossFree(), HashRouting()], "LossFree and HashRouting both choose a token's experts"),
        ([SimBal(0.1), SimBal(0.2)], "several strategies of one class need names"),
        (SimBal, "is no instance of simbal.balancing.Balancing"),
        (None, "NoneType: None is no instance of"),
        ({"simbal": 0.1}, "simbal: 0.1 is no instance of"),
        (LossFree(3, 8), "LossFree: the strategy was made for num_layers=3 and num_experts=8, but the model has"),
    ],
)
def test_strategies(strategies, sentence):
    model = host()
    with pytest.raises(UserError, match=sentence) as error:
        attach(model, strategies)
    assert "\n" not in str(error.value)
    assert not hooks(model)
    attach(model, SimBal()).detach()


@pytest.mark.parametrize("strategy", [LoadBalancingLoss(), QuantileBalancing()])
def test_nothing_to_choose(strategy):
    with pytest.raises(UserError, match=f"{type(strategy).__name__}: model.top_k equals model.num_experts"):
        attach(host(num_experts_per_tok=E), strategy)


def by_distance(logits_NE: torch.Tensor, top_k: int) -> tuple[torch.Tensor, ...]:
    weights_NK, experts_NK = (1 / (1 + logits_NE.square())).topk(top_k)
    return weights_NK / weights_NK.sum(-1, keepdim=True), experts_NK


def to_other_experts(logits_NE: torch.Tensor, top_k: int) -> tuple[torch.Tensor, ...]:
    weights_NK, experts_NK = logits_NE.softmax(-1).topk(top_k)
    return weights_NK / weights_NK.sum(-1, keepdim=True), (experts_NK + 1) % E


@pytest.mark.parametrize("choose", [by_distance, to_other_experts])
def test_a_router_of_the_right_name_that_chooses_otherwise(choose):
    model = host()
    router = model.model.layers[1].mlp.gate
    router.forward = lambda x_ND: (x_ND @ router.weight.T, *choose(x_ND @ router.weight.T, router.top_k))
    with pytest.raises(UserError, match="layers.1.mlp.gate is a MixtralTopKRouter, which follows none of the rules"):
        attach(model, LossFree())


def test_routers_of_different_kinds():
    model = host()
    model.model.layers[1].mlp.gate.top_k = 3
    with pytest.raises(UserError, match="the routers of MixtralForCausalLM differ in number of experts"):
        attach(model, SimBal())


@pytest.mark.parametrize("strategy", [SimBal(), ErnieOrthogonalLoss(decoupled=True)])
def test_frozen_routers(strategy):
    model = host()
    model.requires_grad_(False)
    with pytest.raises(UserError, match="acts on the router weights, and all of them are frozen"):
        attach(model, strategy)
    attach(model, LossFree()).detach()


def test_a_second_attachment():
    model = host()
    with attach(model, LossFree(update_rate=1.0)) as balancing:
        model(**batch())
        balancing.step()  # a bias by which the router chooses otherwise
        with pytest.raises(UserError, match="has strategies attached: detach"):
            attach(model, SimBal())
    attach(model, SimBal()).detach()


def test_a_loss_or_a_step_without_a_pass():
    model = host()
    with attach(model, LossFree()) as balancing:
        with pytest.raises(UserError, match="call the model first"):
            balancing.loss()
        model.eval()
        model(**batch())
        with pytest.raises(UserError, match="call model.train()"):
            balancing.step()


def test_padding_where_each_sequence_is_taken_by_itself():
    model = host()
    with attach(model, LoadBalancingLoss(scope="sequence")) as balancing:
        model(**padded())
        with pytest.raises(UserError, match="LoadBalancingLoss takes each sequence by itself"):
            balancing.loss()
