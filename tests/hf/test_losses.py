"""Losses through `attach` equal the losses of transformers and of our own router with the same logits."""

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from simbal.balancing import (
    ErnieOrthogonalLoss,
    LoadBalancingLoss,
    LossFree,
    OffDiagonalCosine,
    PooledLoadBalancingLoss,
    RouterZLoss,
    RowNorm,
    Schedule,
    SimBal,
)
from simbal.errors import UserError
from simbal.hf import attach
from simbal.model.router import Router
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


@pytest.mark.parametrize("name", HOSTS)
def test_a_routing_equals_that_of_our_router_with_the_same_weight(name):
    model, inputs_ND = host(name), []
    with attach(model, RouterZLoss()) as balancing:
        for router in balancing.routers:
            router.module.register_forward_hook(lambda module, args, output: inputs_ND.append(args[0]))
        model(**batch())
        for router, x_ND, routing in zip(balancing.routers, inputs_ND, balancing.routings, strict=True):
            ours = Router(x_ND.shape[1], E, K, router.gating, router.rule.renormalize, layer=0)
            ours.weight_ED = router.weight_ED
            expected = ours(x_ND, batch()["input_ids"])
            assert routing.num_sequences == B
            for key in ("logits_NE", "probs_NE", "topk_experts_NK", "topk_probs_NK", "tokens_per_expert_E"):
                torch.testing.assert_close(getattr(routing, key), getattr(expected, key))


@pytest.mark.parametrize("make", [SimBal, ErnieOrthogonalLoss, OffDiagonalCosine, RowNorm])
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


def test_two_micro_batches_have_the_gradient_of_one_batch():
    full, split, strategies = host(), host(), [LoadBalancingLoss(), SimBal(), RouterZLoss()]
    with attach(full, strategies) as balancing:
        (full(**batch(sequences=4)).loss + balancing.loss()).backward()
    with attach(split, strategies) as balancing:
        for part in range(2):
            inputs = {key: value[2 * part : 2 * part + 2] for key, value in batch(sequences=4).items()}
            ((split(**inputs).loss + balancing.loss()) / 2).backward()
    for one, other in zip(full.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_a_counting_pass_makes_micro_batches_equal_one_batch():
    inputs, loss = batch(sequences=4), LoadBalancingLoss(scope="global")
    halves = [{key: value[2 * part : 2 * part + 2] for key, value in inputs.items()} for part in range(2)]
    full, split = host(), host()
    with attach(full, loss) as balancing:
        full(**inputs)
        balancing.loss().backward()
    with attach(split, loss) as balancing:
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


def test_bf16_logits_are_balanced_in_fp32():
    model = host().bfloat16()
    with attach(model, [PooledLoadBalancingLoss(coef=1.0), LossFree()]) as balancing:
        model(**batch())
        assert balancing.loss().dtype == torch.float32
        assert balancing.routings[0].topk_probs_NK.dtype == torch.float32
        assert balancing.strategies.parts["LossFree"].bias_LE.dtype == torch.float32


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
