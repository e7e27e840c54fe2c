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
    RouterZLoss,
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
    LogitNorm(2.0), Sinkhorn(), HashRouting(1), UniformRouting(1), RouterZLoss(),
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
                assert (recorded.steered, recorded.num_sequences) == (expected.steered, B)
                for key in ("logits_NE", "probs_NE", "topk_experts_NK", "topk_probs_NK", "tokens_per_expert_E"):
                    torch.testing.assert_close(getattr(recorded, key), getattr(expected, key))


@pytest.mark.parametrize("strategies", [[QuantileBalancing(), SimBal()], [UniformRouting()]])
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


def test_a_steered_bf16_model_computes_in_bf16_and_is_balanced_in_fp32():
    model = host().bfloat16()
    calls = record_experts(model)
    model(**batch())
    plain = [tensor.dtype for call in calls for tensor in call]
    calls.clear()
    with attach(model, [LossFree(), RouterZLoss()]) as balancing:
        output = model(**batch(), output_router_logits=True)
        assert balancing.loss().dtype == balancing.routings[0].topk_probs_NK.dtype == torch.float32
        assert balancing.strategies.parts["LossFree"].bias_LE.dtype == torch.float32
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


def test_a_decoupled_step_moves_the_routers_after_the_optimizer():
    model = host()
    before = [weight.detach().clone() for weight in router_weights(model).values()]
    penalty = ErnieOrthogonalLoss(coef=1.0)
    with attach(model, ErnieOrthogonalLoss(coef=1.0, decoupled=True)) as balancing:
        model(**batch())
        assert balancing.loss() == 0
        with pytest.raises(UserError, match="ErnieOrthogonalLoss needs the learning rate"):
            balancing.step()
        balancing.step(lr=0.5)
    for old_ED, new_ED in zip(before, router_weights(model).values(), strict=True):
        (gradient_ED,) = torch.autograd.grad(penalty.of_weight(old_ED.requires_grad_()), old_ED)
        torch.testing.assert_close(new_ED, old_ED - 0.5 * gradient_ED)
