"""A loss through `attach` is what others, and our own model, compute from the same logits."""

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as mixtral_loss
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func as olmoe_loss
from transformers.models.qwen2_moe.modeling_qwen2_moe import load_balancing_loss_func as qwen2_loss
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func as qwen3_loss

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
from tests.hf.models import HOSTS, B, E, K, S, batch, host, padded, router_weights

THEIRS = {"mixtral": mixtral_loss, "olmoe": olmoe_loss, "qwen2_moe": qwen2_loss, "qwen3_moe": qwen3_loss}


@pytest.mark.parametrize("inputs", [batch(), padded()], ids=["whole", "padded"])
@pytest.mark.parametrize("name", HOSTS)
def test_lbl_hf_is_the_aux_loss_of_transformers_in_the_same_forward_pass(name, inputs):
    model = host(HOSTS[name])
    with attach(model, PooledLoadBalancingLoss(coef=1.0)) as balancing:
        output = model(**inputs, output_router_logits=True)
        ours = balancing.loss()
    theirs = THEIRS[name](output.router_logits, E, K, inputs.get("attention_mask"))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ours, output.aux_loss)
    weights = [*router_weights(model).values()]
    ours_L, theirs_L = (torch.autograd.grad(loss, weights, retain_graph=True) for loss in (ours, theirs))
    assert all(gradient.abs().sum() > 0 for gradient in theirs_L)
    torch.testing.assert_close(ours_L, theirs_L)


@pytest.mark.parametrize("name", HOSTS)
def test_the_loss_of_olmoe_is_the_mean_of_theirs_over_single_layers(name):
    model = host(HOSTS[name])
    with attach(model, LoadBalancingLoss(1.0, scope="micro", norm="E/K", over_layers="mean")) as balancing:
        output = model(**batch(), output_router_logits=True)
        theirs = [THEIRS[name]((logits_NE,), E, K) / K for logits_NE in output.router_logits]
        torch.testing.assert_close(balancing.loss(), torch.stack(theirs).mean())


@pytest.mark.parametrize("name", HOSTS)
def test_a_routing_is_that_of_our_own_router_with_the_same_weight(name):
    model = host(HOSTS[name])
    inputs_ND = []
    with attach(model, RouterZLoss()) as balancing:
        for router in balancing.routers:
            router.module.register_forward_hook(lambda module, args, output: inputs_ND.append(args[0]))
        model(**batch())
        assert len(balancing.routings) == len(inputs_ND) == len(router_weights(model))
        for router, x_ND, routing in zip(balancing.routers, inputs_ND, balancing.routings, strict=True):
            ours = Router(x_ND.shape[1], E, K, router.gating, router.renormalize, layer=0)
            ours.weight_ED = router.weight_ED
            expected = ours(x_ND, batch()["input_ids"])
            assert routing.num_sequences == B
            for key in ("logits_NE", "probs_NE", "topk_experts_NK", "topk_probs_NK", "tokens_per_expert_E"):
                torch.testing.assert_close(getattr(routing, key), getattr(expected, key))


@pytest.mark.parametrize("make", [SimBal, ErnieOrthogonalLoss, OffDiagonalCosine, RowNorm])
@pytest.mark.parametrize("name", HOSTS)
def test_a_loss_of_weights_reaches_the_routers_and_nothing_else(name, make):
    model = host(HOSTS[name])
    with attach(model, make(coef=0.5)) as balancing:
        model(**batch())
        loss = balancing.loss()
    weights = router_weights(model)
    torch.testing.assert_close(loss, sum(make(coef=0.5).of_weight(weight_ED) for weight_ED in weights.values()))
    loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == weights.keys()
    assert all(weight_ED.grad.abs().sum() > 0 for weight_ED in weights.values())


@pytest.mark.parametrize("strategy", [LoadBalancingLoss(), PooledLoadBalancingLoss(), RouterZLoss()])
def test_a_loss_of_tokens_reaches_every_router(strategy):
    model = host()
    with attach(model, strategy) as balancing:
        model(**batch())
        balancing.loss().backward()
    assert all(weight_ED.grad.abs().sum() > 0 for weight_ED in router_weights(model).values())
    assert model.lm_head.weight.grad is None


def test_two_micro_batches_have_the_gradient_of_one_batch():
    whole, cut = host(), host()
    strategies = [LoadBalancingLoss(), SimBal(), RouterZLoss()]
    with attach(whole, strategies) as balancing:
        (whole(**batch(sequences=4)).loss + balancing.loss()).backward()
    with attach(cut, strategies) as balancing:
        for part in range(2):
            inputs = {key: value[2 * part : 2 * part + 2] for key, value in batch(sequences=4).items()}
            ((cut(**inputs).loss + balancing.loss()) / 2).backward()
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_a_counting_pass_makes_micro_batches_the_same_as_one_batch():
    inputs, loss = batch(sequences=4), LoadBalancingLoss(scope="global")
    halves = [{key: value[2 * part : 2 * part + 2] for key, value in inputs.items()} for part in range(2)]
    whole, cut = host(), host()
    with attach(whole, loss) as balancing:
        whole(**inputs)
        balancing.loss().backward()
    with attach(cut, loss) as balancing:
        with balancing.counting_pass():
            for half in halves:
                cut(**half)
        for half in halves:
            cut(**half)
            (balancing.loss() / 2).backward()
        balancing.step()
        cut(**halves[0])
        balancing.loss()
        cut(**halves[1])
        with pytest.raises(UserError, match="several micro-batches: run them all under counting_pass"):
            balancing.loss()
    for one, other in zip(router_weights(whole).values(), router_weights(cut).values(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)


def test_losses_are_reported_by_name_with_schedule_and_reduction_over_layers():
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


def test_logits_in_bf16_are_balanced_in_fp32():
    model = host().bfloat16()
    with attach(model, [PooledLoadBalancingLoss(coef=1.0), LossFree()]) as balancing:
        model(**batch())
        assert balancing.loss().dtype == torch.float32
        assert balancing.routings[0].topk_probs_NK.dtype == torch.float32
        assert balancing.strategies.parts["LossFree"].bias_LE.dtype == torch.float32


def test_padding_is_in_no_count():
    model, inputs = host(), padded()
    with attach(model, LossFree()) as balancing:
        model(**inputs)
        for routing in balancing.routings:
            assert routing.tokens_per_expert_E.sum() == K * (8 + 5 + 3)
            assert routing.num_sequences == 1  # the three are no longer of one length
        model(**batch())
        for routing in balancing.routings:
            assert routing.tokens_per_expert_E.sum() == K * B * S


def test_after_a_cache_the_mask_of_the_new_tokens_counts():
    model = host().eval()
    tokens_BS, mask_BS = batch()["input_ids"], torch.ones(B, S, dtype=torch.int64)
    mask_BS[0, :5] = 0  # padding on the left, as for generation
    mask_BS[1, -1] = 0
    with attach(model, RouterZLoss()) as balancing, torch.no_grad():
        cache = model(tokens_BS[:, :6], attention_mask=mask_BS[:, :6], use_cache=True).past_key_values
        assert len(balancing.routings[0].logits_NE) == 6 * B - 5
        model(tokens_BS[:, 6:], attention_mask=mask_BS, past_key_values=cache)
        assert len(balancing.routings[0].logits_NE) == 2 * B - 1
