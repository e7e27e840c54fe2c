"""Strategies and models that cannot be attached are refused before the model is changed."""

import pytest

from simbal.balancing import (
    ErnieOrthogonalLoss,
    ExpertRouterCoupling,
    FrozenRouter,
    HashRouting,
    LossFree,
    OrthogonalInit,
    OrthogonalParametrization,
    PrototypeRouter,
    SimBal,
)
from simbal.errors import UserError
from simbal.hf import attach
from tests.hf.architectures import E, batch, host
from tests.hf.test_hooks import hooks


@pytest.mark.parametrize(
    ("strategies", "part"),
    [
        (OrthogonalInit(), "OrthogonalInit cannot be attached: .*orthogonal_"),
        ({"param": OrthogonalParametrization()}, "param cannot be attached: .*parametrizes"),
        ([FrozenRouter(), SimBal()], "SimBal .* frozen: attach it without FrozenRouter"),
        (ExpertRouterCoupling(), "ExpertRouterCoupling cannot be attached: .*experts' weights"),
        (PrototypeRouter(), "PrototypeRouter cannot be attached: .*logits"),
        ([LossFree(), HashRouting()], "LossFree and HashRouting"),
        ([SimBal(0.1), SimBal(0.2)], "need names"),
        (SimBal, "is not an instance of simbal.balancing.Balancing"),
        (LossFree(2, 8), "LossFree: .*num_layers=2"),
    ],
)
def test_unsuitable_strategies_are_refused(strategies, part):
    model = host()
    with pytest.raises(UserError, match=part):
        attach(model, strategies)
    assert not hooks(model)
    attach(model, SimBal()).detach()


def test_routers_with_an_unknown_rule_or_different_sizes_are_refused():
    model = host()
    router = model.model.layers[1].mlp.gate
    router.top_k = 3
    with pytest.raises(UserError, match="differ in number of experts"):
        attach(model, SimBal())
    forward = router.forward

    def choose_next_expert(x_ND):
        logits_NE, weights_NK, experts_NK = forward(x_ND)
        return logits_NE, weights_NK, (experts_NK + 1) % E

    router.forward = choose_next_expert
    with pytest.raises(UserError, match=r"layers.1.mlp.gate, a MixtralTopKRouter, follows none of the rules"):
        attach(model, SimBal())


def test_a_router_that_also_weights_shared_experts_is_refused():
    with pytest.raises(UserError, match="InklingTopkRouter, follows none of the rules"):
        attach(host("inkling_text"), SimBal())


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
