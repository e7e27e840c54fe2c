"""Losses through `attach` equal the losses of transformers and of our own router with the same logits."""

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from simbal.balancing import (
    FrozenRouter,
    LoadBalancingLoss,
    LossFree,
    PooledLoadBalancingLoss,
    RouterZLoss,
    RowNorm,
    Schedule,
    SimBal,
)
from simbal.errors import UserError
from simbal.hf import attach
from tests.hf.architectures import HOSTS, B, E, K, S, batch, host, padded, router_weights


@pytest.mark.parametrize("inputs", [batch(), padded()], ids=["full", "padded"])
@pytest.mark.parametrize("name", [*HOSTS, "qwen2_moe"])
def test_lbl_hf_is_the_auxiliary_loss_of_transformers(name, inputs):
    model = host(name)
    with attach(model, PooledLoadBalancingLoss(coef=1.0)) as balancing:
        output = model(**inputs, output_router_logits=True)
        ours = balancing.loss()
    torch.testing.assert_close(ours, output.aux_loss)
    weights = [*router_weights(model).values()]
    ours_L, theirs_L = (torch.autograd.grad(x, weights, retain_graph=True) for x in (ours, output.aux_loss))
    assert all(gradient.abs().sum() > 0 for gradient in theirs_L)
    torch.testing.assert_close(ours_L, theirs_L)


def test_lbl_per_layer_is_the_mean_of_transformers_loss_over_single_layers():
    model = host()
    with attach(model, LoadBalancingLoss(1.0, scope="micro", norm="E/K", over_layers="mean")) as balancing:
        output = model(**batch(), output_router_logits=True)
        theirs = [load_balancing_loss_func((logits_NE,), E, K) / K for logits_NE in output.router_logits]
        torch.testing.assert_close(balancing.loss(), torch.stack(theirs).mean())


@pytest.mark.parametrize("make", [SimBal, RowNorm])
def test_a_loss_on_weights_has_a_gradient_for_all_routers_and_nothing_else(make):
    model = host()
    with attach(model, make(coef=0.5)) as balancing:
        model(**batch())
        loss = balancing.loss()
    weights = router_weights(model)
    torch.testing.assert_close(loss, sum(make(coef=0.5).of_weight(weight_ED) for weight_ED in weights.values()))
    loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == weights.keys()
    assert all(weight_ED.grad.abs().sum() > 0 for weight_ED in weights.values())


def test_a_counting_pass_makes_micro_batches_equal_one_batch():
    inputs, losses = batch(sequences=4), [LoadBalancingLoss(scope="global"), SimBal(), RouterZLoss()]
    halves = [{key: value[2 * part : 2 * part + 2] for key, value in inputs.items()} for part in range(2)]
    full, split = host(), host()
    with attach(full, losses) as balancing:
        full(**inputs)
        balancing.loss().backward()
    with attach(split, losses) as balancing:
        with balancing.counting_pass():
            for half in halves:
                split(**half)
        for half in halves:
            split(**half)
            (balancing.loss() / 2).backward()
        balancing.step()
        split(**halves[0])
        balancing.loss()
        split(**halves[1])
        with pytest.raises(UserError, match="counting_pass"):
            balancing.loss()
    for one, other in zip(router_weights(full).values(), router_weights(split).values(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)


def test_losses_include_schedule_and_reduction_over_layers():
    model = host()
    strategies = {"simbal": SimBal(coef=1.0), "z": RouterZLoss(coef=1.0), "lf": LossFree()}
    schedules = {"simbal": Schedule(((0, 1.0), (2, 0.0)))}
    with attach(model, strategies, schedules=schedules, layer_reduce="mean") as balancing:
        for factor in (1.0, 0.5, 0.0):
            model(**batch())
            expected = torch.stack([SimBal(coef=1.0).of_weight(weight) for weight in router_weights(model).values()])
            losses = balancing.losses()
            assert losses.keys() == {"simbal", "z"}
            torch.testing.assert_close(losses["simbal"], factor * expected.mean())
            torch.testing.assert_close(balancing.loss(), losses["simbal"] + losses["z"])
            balancing.step()


def test_padding_is_not_counted():
    model = host()
    with attach(model, LossFree()) as balancing:
        model(**padded())
        for routing in balancing.routings:
            assert routing.tokens_per_expert_E.sum() == K * (8 + 5 + 3)
            assert routing.num_sequences == 1  # sequences differ in length
        model(**batch())
        assert all(routing.tokens_per_expert_E.sum() == K * B * S for routing in balancing.routings)


def test_with_a_cache_only_new_tokens_count():
    model = host().eval()
    tokens_BS, mask_BS = batch()["input_ids"], torch.ones(B, S, dtype=torch.int64)
    mask_BS[0, :5] = 0  # left padding, as for generation
    mask_BS[1, -1] = 0
    with attach(model, RouterZLoss()) as balancing, torch.no_grad():
        cache = model(tokens_BS[:, :6], attention_mask=mask_BS[:, :6], use_cache=True).past_key_values
        assert len(balancing.routings[0].logits_NE) == 6 * B - 5
        model(tokens_BS[:, 6:], attention_mask=mask_BS, past_key_values=cache)
        assert len(balancing.routings[0].logits_NE) == 2 * B - 1


def test_a_frozen_router_is_not_trained_until_detach():
    """Neither weight decay nor a stale gradient changes it, and the losses still train the hidden states."""
    model = host("gpt_oss")
    routers = {name: p for name, p in model.named_parameters() if ".router." in name}
    before = {name: parameter.detach().clone() for name, parameter in routers.items()}
    model(**batch()).loss.backward()
    embedding = model.get_input_embeddings().weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    with attach(model, [FrozenRouter(), LoadBalancingLoss(), LossFree(update_rate=0.1)]) as balancing:
        model.get_input_embeddings().zero_grad()
        model(**batch())
        balancing.loss().backward()
        assert embedding.grad.abs().sum() > 0
        optimizer.step()
        balancing.step()
        assert balancing.strategies.parts["LossFree"].bias_LE.any()
    for name, parameter in routers.items():
        assert torch.equal(parameter, before[name])
        assert parameter.requires_grad
