"""Attaching changes nothing but what a strategy is there to change, and detaching takes all of it back."""

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
from tests.hf.models import HOSTS, B, K, S, batch, host, router_weights

LOSSES = [SimBal(), LoadBalancingLoss(), RouterZLoss()]


def hooks(model: nn.Module) -> list:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).items()]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    taken = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return taken


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", HOSTS)
def test_losses_leave_outputs_and_parameters_bit_equal(name, train):
    model = host(HOSTS[name]).train(train)
    before, keys = model(**batch()).logits, [*model.state_dict()]
    with attach(model, LOSSES):
        assert torch.equal(model(**batch()).logits, before)
        assert [*model.state_dict()] == keys


@pytest.mark.parametrize("strategy", [LossFree(update_rate=1.0), HashRouting(), LogitNorm(), Sinkhorn()])
@pytest.mark.parametrize("name", HOSTS)
def test_after_detaching_the_model_is_as_before(name, strategy):
    model = host(HOSTS[name])
    model(**batch(), output_router_logits=True)  # transformers installs hooks of its own, once
    before, its_own = model(**batch()).logits, hooks(model)
    attributes = {name: [*vars(module)] for name, module in model.named_modules()}
    balancing = attach(model, copy.deepcopy(strategy))
    model(**batch())
    balancing.step()
    assert not torch.equal(model(**batch()).logits, before)
    balancing.detach()
    assert torch.equal(model(**batch()).logits, before)
    assert hooks(model) == its_own
    assert attributes == {name: [*vars(module)] for name, module in model.named_modules()}


def test_an_error_inside_detaches_as_well():
    model = host()
    with pytest.raises(RuntimeError, match="stop"), attach(model, SimBal()):
        raise RuntimeError("stop")
    assert not hooks(model)


@pytest.mark.parametrize("end", ["step", "detach", "discard"])
def test_what_was_recorded_is_freed(end):
    model = host()
    balancing = attach(model, LOSSES)
    (model(**batch()).loss + balancing.loss()).backward()
    recorded = [weakref.ref(routing.logits_NE) for routing in balancing.routings]
    getattr(balancing, end)()
    gc.collect()
    assert recorded
    assert not any(reference() is not None for reference in recorded)


def counts(balancing) -> int:
    """Tokens of the step in progress that layer 0 has sent to experts."""
    counts_LE = balancing._step.counts_LE
    return 0 if counts_LE is None else int(counts_LE[0].sum())


def test_evaluation_is_read_but_not_counted():
    model = host()
    with attach(model, LoadBalancingLoss()) as balancing:
        model(**batch())
        in_training = balancing.loss()
        with torch.no_grad():
            model(**batch(1))
        model.eval()
        model(**batch())
        torch.testing.assert_close(balancing.loss(), in_training)
        assert counts(balancing) == B * S * K


@pytest.mark.parametrize("strategies", [LOSSES, [*LOSSES, LossFree(update_rate=1.0)], [LogitNorm()], [HashRouting()]])
@pytest.mark.parametrize("name", HOSTS)
def test_gradient_checkpointing_changes_no_gradient_and_no_count(name, strategies):
    found = []
    for checkpointing in (False, True):
        model = host(HOSTS[name])
        if checkpointing:
            model.activation_checkpointing_enable()
        with attach(model, copy.deepcopy(strategies)) as balancing:
            for seed in (0, 1):  # with a bias in the second step
                model(**batch(seed))
                balancing.step()
            (model(**batch(2)).loss + balancing.loss()).backward()
            (model(**batch(3)).loss + balancing.loss()).backward()
            assert counts(balancing) == 2 * B * S * K
        found.append(gradients(model))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_reentrant_checkpointing_is_refused_where_it_would_drop_the_gradient():
    model = host()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    with attach(model, [SimBal(), LossFree()]) as balancing:
        (model(**batch()).loss + balancing.loss()).backward()
        assert counts(balancing) == B * S * K
    assert all(weight_ED.grad.abs().sum() > 0 for weight_ED in router_weights(model).values())
    with attach(model, PooledLoadBalancingLoss()) as balancing:
        model(**batch())
        with pytest.raises(
            UserError, match="PooledLoadBalancingLoss needs the gradient .* checkpointing has dropped it"
        ):
            balancing.loss()


def test_a_recomputed_pass_that_is_not_the_last_one_is_never_routed_by_the_tokens_of_another():
    model = host()
    model.activation_checkpointing_enable()
    with attach(model, HashRouting()):
        first = model(**batch(0)).loss
        model(**batch(1))
        with pytest.raises(UserError, match="HashRouting chooses experts by token ids"):
            first.backward()


def test_a_model_wrapped_after_attaching_is_still_seen():
    model = host()
    with attach(nn.ModuleDict({"inner": model})["inner"], SimBal()) as balancing:
        model.model(batch()["input_ids"])  # the backbone alone, by position
        assert counts(balancing) == B * S * K
        assert balancing.loss() > 0


def test_generation_uses_the_bias_of_training():
    model = host().eval()
    prompt = batch()["input_ids"][:1, :4]
    plain = model.generate(prompt, min_new_tokens=6, max_new_tokens=6, do_sample=False)
    strategy = LossFree(2, 4)
    strategy.bias_LE.copy_(torch.tensor([[0.0, 0, 50, 50], [50, 50, 0, 0]]))
    with attach(model, strategy) as balancing:
        steered = model.generate(prompt, min_new_tokens=6, max_new_tokens=6, do_sample=False)
        chosen = [sorted(routing.topk_experts_NK[-1].tolist()) for routing in balancing.routings]
    assert chosen == [[2, 3], [0, 1]]
    assert torch.equal(model.generate(prompt, min_new_tokens=6, max_new_tokens=6, do_sample=False), plain)
    assert not torch.equal(steered, plain)
