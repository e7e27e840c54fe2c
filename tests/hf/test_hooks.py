"""Attached losses change nothing in the model, and detaching restores everything."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from simbal.balancing import (
    HashRouting,
    LoadBalancingLoss,
    LogitNorm,
    LossFree,
    PooledLoadBalancingLoss,
    RouterZLoss,
    SimBal,
    Sinkhorn,
)
from simbal.errors import UserError
from simbal.hf import attach
from tests.hf.architectures import HOSTS, B, K, S, batch, host, router_weights

LOSSES = [SimBal(), LoadBalancingLoss(), RouterZLoss()]


def hooks(model: nn.Module) -> list:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).items()]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", [*HOSTS, "qwen2_moe"])
def test_losses_do_not_change_outputs_or_parameters(name, train):
    model = host(name).train(train)
    before, keys = model(**batch()).logits, [*model.state_dict()]
    with attach(model, LOSSES):
        assert torch.equal(model(**batch()).logits, before)
        assert [*model.state_dict()] == keys


@pytest.mark.parametrize("strategy", [LossFree(update_rate=1.0), HashRouting(), LogitNorm(), Sinkhorn()])
def test_detaching_restores_the_model(strategy):
    model = host()
    model(**batch(), output_router_logits=True)  # transformers registers its own hooks once
    before, own_hooks = model(**batch()).logits, hooks(model)
    attributes = {name: [*vars(module)] for name, module in model.named_modules()}
    balancing = attach(model, copy.deepcopy(strategy))
    model(**batch())
    balancing.step()
    assert not torch.equal(model(**batch()).logits, before)
    balancing.detach()
    assert torch.equal(model(**batch()).logits, before)
    assert hooks(model) == own_hooks
    assert attributes == {name: [*vars(module)] for name, module in model.named_modules()}


@pytest.mark.parametrize("end", ["step", "detach"])
def test_recorded_tensors_are_freed(end):
    model = host()
    balancing = attach(model, LOSSES)
    (model(**batch()).loss + balancing.loss()).backward()
    recorded = [weakref.ref(routing.logits_NE) for routing in balancing.routings]
    getattr(balancing, end)()
    gc.collect()
    assert not any(reference() is not None for reference in recorded)


def test_evaluation_is_recorded_but_not_counted():
    model = host()
    with attach(model, LoadBalancingLoss()) as balancing:
        model(**batch())
        in_training = balancing.loss()
        with torch.no_grad():
            model(**batch(1))
        model.eval()
        model(**batch())
        torch.testing.assert_close(balancing.loss(), in_training)
        assert balancing.counts_LE[0].sum() == B * S * K


@pytest.mark.parametrize("strategies", [[*LOSSES, LossFree(update_rate=1.0)], [LogitNorm()], [HashRouting()]])
def test_gradient_checkpointing_changes_no_gradient_and_no_count(strategies):
    found = []
    for checkpointing in (False, True):
        model = host()
        if checkpointing:
            model.activation_checkpointing_enable()
        with attach(model, copy.deepcopy(strategies)) as balancing:
            for seed in (0, 1):  # the second step has a bias
                model(**batch(seed))
                balancing.step()
            for seed in (2, 3):
                (model(**batch(seed)).loss + balancing.loss()).backward()
            assert balancing.counts_LE[0].sum() == 2 * B * S * K
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*found)


def test_reentrant_checkpointing_is_refused_where_it_drops_the_gradient():
    model = host()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    with attach(model, [SimBal(), LossFree()]) as balancing:
        (model(**batch()).loss + balancing.loss()).backward()
        assert balancing.counts_LE[0].sum() == B * S * K
    assert all(weight_ED.grad.abs().sum() > 0 for weight_ED in router_weights(model).values())
    with attach(model, PooledLoadBalancingLoss()) as balancing:
        model(**batch())
        with pytest.raises(UserError, match="use_reentrant"):
            balancing.loss()


def test_a_recomputation_never_uses_the_token_ids_of_another_pass():
    model = host()
    model.activation_checkpointing_enable()
    with attach(model, HashRouting()):
        first = model(**batch(0)).loss
        model(**batch(1))
        with pytest.raises(UserError, match="HashRouting chooses experts by token ids"):
            first.backward()
