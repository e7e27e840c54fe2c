"""LossFree updates a model's own bias, and the model's own code uses it."""

import pytest
import torch
from torch import Tensor, nn

from simbal.balancing import LoadBalancingLoss, LogitNorm, LossFree, QuantileBalancing, RouterZLoss, SimBal
from simbal.errors import UserError
from simbal.hf import attach
from tests.hf.architectures import (
    BIASED,
    GROUPS_WITHOUT_BIAS,
    B,
    E,
    K,
    S,
    architecture,
    batch,
    biases,
    host,
    record_experts,
)


def with_bias(name: str) -> nn.Module:
    """Return a model whose biases are not 0."""
    model = host(name)
    generator = torch.Generator().manual_seed(1)
    for bias in biases(model).values():
        bias.copy_(torch.randn(bias.shape, generator=generator) / 10)
    return model


def stacked(model: nn.Module) -> Tensor:
    return torch.stack([*biases(model).values()])


@pytest.mark.parametrize("name", BIASED)
def test_the_models_bias_moves_by_its_definition_and_stays_after_detach(name):
    """DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): b -= u for an overloaded expert, b += u for an underloaded one."""
    model = with_bias(name)
    expected = {key: bias.clone() for key, bias in biases(model).items()}
    plain, calls = model(**batch()).logits, record_experts(model)
    strategies = [LossFree(update_rate=0.03, bias_on="scores"), SimBal(), LoadBalancingLoss()]
    with attach(model, strategies) as balancing:
        assert torch.equal(model(**batch()).logits, plain)  # nothing is steered
        balancing.discard()
        for step in range(3):
            calls.clear()
            before = model(**batch(step)).logits
            balancing.step()
            layers = calls[-len(expected) :]  # DeepSeek-V4 begins with a layer whose choice is fixed
            for bias, (_, experts_NK, _) in zip(expected.values(), layers, strict=True):
                for expert in range(E):
                    load = int((experts_NK == expert).sum())
                    bias.view(-1)[expert] += 0.03 * ((load < B * S * K / E) - (load > B * S * K / E))
            torch.testing.assert_close(biases(model), expected)
            after = model(**batch(step)).logits
            assert not torch.equal(after, before)  # the model's own code chooses by the bias
            balancing.discard()
    assert torch.equal(model(**batch(2)).logits, after)


def test_the_values_in_the_model_are_authoritative():
    """Weights are loaded after attaching, the model is cast, and its state moves to another model."""
    source, target = with_bias("deepseek_v3"), host("deepseek_v3")
    with attach(target, {"lf": LossFree(update_rate=0.1, bias_on="scores")}) as balancing:
        target.load_state_dict(source.state_dict())
        assert torch.equal(balancing.state_dict()["strategies"]["strategies.lf.bias_LE"], stacked(source))
        target.double().float()  # replaces the buffers
        target(**batch())
        balancing.step()
        moved = stacked(target)
        assert 0 < (moved - stacked(source)).abs().max() < 0.11
        state = balancing.state_dict()
    other = architecture("deepseek_v3")
    with attach(other, {"lf": LossFree(bias_on="scores")}) as balancing:
        balancing.load_state_dict(state)
    assert torch.equal(stacked(other), moved)


def test_a_bf16_bias_is_refused_and_the_proposed_fix_works():
    model = with_bias("ernie4_5_moe").bfloat16()
    with pytest.raises(UserError, match=r"half precision .* m\.e_score"):
        attach(model, LossFree(bias_on="scores"))
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.data = module.e_score_correction_bias.data.float()
    with attach(model, LossFree(bias_on="scores")) as balancing:
        model(**batch())
        balancing.step()
    assert all(bias.dtype == torch.float32 for bias in biases(model).values())


@pytest.mark.parametrize(
    ("name", "strategy", "part"),
    [
        ("deepseek_v3", QuantileBalancing(), r"use LossFree\(bias_on='scores'\)"),
        ("deepseek_v3", LossFree(), "set bias_on='scores'"),
        ("deepseek_v3", LossFree(bias_on="scores", bias_dtype="bf16"), "bias_dtype='fp32'"),
        ("deepseek_v2", LossFree(bias_on="scores"), "have another rule: .* groups=Groups[^;]*$"),
        ("phimoe", LogitNorm(), "samples experts in training: attach losses, not LogitNorm"),
    ],
)
def test_strategies_that_cannot_choose_under_the_models_rule_are_refused(name, strategy, part):
    model = architecture(name, **GROUPS_WITHOUT_BIAS if name == "deepseek_v2" else {})
    with pytest.raises(UserError, match=part):
        attach(model, strategy)


def test_sampled_experts_are_recorded():
    model = host("phimoe")
    calls = record_experts(model)
    with attach(model, [RouterZLoss(), LoadBalancingLoss(choice="biased")]) as balancing:
        model(**batch())
        for routing, (_, experts_NK, _) in zip(balancing.routings, calls, strict=True):
            assert torch.equal(routing.topk_experts_NK, experts_NK)
            topk_NK = routing.logits_NE.topk(K).indices
            assert torch.equal(routing.unsteered_experts_NK.sort().values, topk_NK.sort().values)


def test_adjusted_logits_go_into_the_models_rule():
    model = with_bias("deepseek_v3")
    with attach(model, LogitNorm(2.0)) as balancing:
        model(**batch())
        for router, routing in zip(balancing.routers, balancing.routings, strict=True):
            torch.testing.assert_close(routing.logits_NE.std(-1, unbiased=False), torch.full((B * S,), 2.0))
            experts_NK, weights_NK = router.rule.decide(routing.logits_NE, K, router.bias_E)
            assert torch.equal(routing.topk_experts_NK, experts_NK)
            torch.testing.assert_close(routing.topk_probs_NK, weights_NK)
