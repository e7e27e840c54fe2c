"""Strategies that choose experts or change logits do so in the model as in our own router."""

import copy

import pytest
import torch

from simbal.balancing import (
    ErnieOrthogonalLoss,
    HashRouting,
    LogitNorm,
    LossFree,
    QuantileBalancing,
    SimBal,
    Sinkhorn,
    UniformRouting,
)
from simbal.errors import UserError
from simbal.hf import attach
from simbal.model.router import Router
from tests.hf.architectures import HOSTS, B, E, K, S, batch, host, record_experts, router_weights

STRATEGIES = [
    LossFree(update_rate=0.5), LossFree(update_rate=0.1, bias_on="scores", center=True), QuantileBalancing(),
    LogitNorm(2.0), Sinkhorn(), HashRouting(1), UniformRouting(1),
]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
@pytest.mark.parametrize("name", HOSTS)
def test_experts_and_weights_equal_those_of_our_router(name, strategy):
    model = host(name)
    with attach(model, copy.deepcopy(strategy)) as balancing:
        model(**batch())
        balancing.step()
        calls = record_experts(model)
        for train in (True, False):
            calls.clear()
            model.train(train)
            model(**batch(1))
            reference = copy.deepcopy(balancing.strategies).train(train)
            for router, (x_ND, experts_NK, weights_NK) in zip(balancing.routers, calls, strict=True):
                ours = Router(x_ND.shape[1], E, K, router.gating, router.rule.renormalize, router.layer)
                ours.weight_ED = router.weight_ED
                expected = ours(x_ND, batch(1)["input_ids"], reference)
                assert torch.equal(experts_NK, expected.topk_experts_NK)
                torch.testing.assert_close(weights_NK, expected.topk_probs_NK)
                recorded = balancing.routings[router.layer]
                assert torch.equal(recorded.topk_experts_NK, expected.topk_experts_NK)
                assert recorded.steered == expected.steered


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_free_bias_moves_by_its_definition_and_only_in_step(micro_batches):
    model = host()
    with attach(model, {"lf": LossFree(update_rate=0.25)}) as balancing:
        bias_LE = balancing.strategies.parts["lf"].bias_LE
        expected_LE = torch.zeros_like(bias_LE)
        for step in range(3):
            counts_LE = torch.zeros_like(bias_LE)
            for part in range(micro_batches):
                model(**batch(10 * step + part))
                for layer, routing in enumerate(balancing.routings):
                    counts_LE[layer] += torch.bincount(routing.topk_experts_NK.flatten(), minlength=E)
                assert torch.equal(bias_LE, expected_LE)
            balancing.step()
            expected_LE += 0.25 * (micro_batches * B * S * K / E - counts_LE).sign()
            assert torch.equal(bias_LE, expected_LE)
        assert expected_LE.abs().sum() > 0


def test_routers_learn_from_the_cross_entropy_under_a_bias():
    model = host()
    plain = model(**batch()).logits
    with attach(model, LossFree(update_rate=1.0)) as balancing:
        torch.testing.assert_close(model(**batch()).logits, plain)  # the bias is 0
        balancing.step()
        model(**batch()).loss.backward()
    assert all(weight_ED.grad.abs().sum() > 0 for weight_ED in router_weights(model).values())


@pytest.mark.parametrize(
    "strategies", [[LossFree(update_rate=0.5)], [QuantileBalancing(), SimBal()], [UniformRouting()]]
)
def test_a_saved_state_resumes(strategies, tmp_path):
    model = host()
    with attach(model, copy.deepcopy(strategies)) as balancing:
        for step in range(3):
            model(**batch(step))
            balancing.step()
        torch.save(balancing.state_dict(), tmp_path / "state.pt")
        expected = model(**batch(9)).logits
    with attach(model, copy.deepcopy(strategies)) as balancing:
        assert not torch.equal(model(**batch(9)).logits, expected)
        balancing.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert balancing.steps == 3
        assert torch.equal(model(**batch(9)).logits, expected)


def test_a_steered_bf16_model_computes_in_bf16():
    model = host().bfloat16()
    calls = record_experts(model)
    model(**batch())
    plain = [tensor.dtype for call in calls for tensor in call]
    calls.clear()
    with attach(model, LossFree()):
        output = model(**batch(), output_router_logits=True)
    assert [tensor.dtype for call in calls for tensor in call] == plain
    assert output.router_logits[0].dtype == torch.bfloat16


def test_router_logits_of_transformers_are_the_adjusted_ones():
    model = host()
    model(**batch(), output_router_logits=True)  # transformers registers its own hooks here, before ours
    with attach(model, LogitNorm(3.0)) as balancing:
        output = model(**batch(), output_router_logits=True)
        for logits_NE, routing in zip(output.router_logits, balancing.routings, strict=True):
            assert torch.equal(logits_NE, routing.logits_NE)
            torch.testing.assert_close(logits_NE.std(-1, unbiased=False), torch.full((B * S,), 3.0))


def test_input_embeddings_work_unless_a_strategy_needs_token_ids():
    model, inputs = host(), batch()
    embedded = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]), "labels": inputs["labels"]}
    with attach(model, LossFree()):
        torch.testing.assert_close(model(**embedded).logits, model(**inputs).logits)
    for strategy in (HashRouting(), UniformRouting()):
        name = type(strategy).__name__
        with attach(model, strategy), pytest.raises(UserError, match=f"{name} chooses experts by token ids"):
            model(**embedded)


@pytest.mark.parametrize("scale_by_lr", [True, False])
def test_a_decoupled_step_moves_the_routers_after_the_optimizer(scale_by_lr):
    model = host()
    before = [weight.detach().clone() for weight in router_weights(model).values()]
    penalty = ErnieOrthogonalLoss(coef=1.0)
    with attach(model, ErnieOrthogonalLoss(coef=1.0, decoupled=True, scale_by_lr=scale_by_lr)) as balancing:
        model(**batch())
        assert balancing.loss() == 0
        if scale_by_lr:
            with pytest.raises(UserError, match="ErnieOrthogonalLoss needs the learning rate"):
                balancing.step()
        balancing.step(lr=0.5)
    for old_ED, new_ED in zip(before, router_weights(model).values(), strict=True):
        (gradient_ED,) = torch.autograd.grad(penalty.of_weight(old_ED.requires_grad_()), old_ED)
        torch.testing.assert_close(new_ED, old_ED - (0.5 if scale_by_lr else 1.0) * gradient_ED)
