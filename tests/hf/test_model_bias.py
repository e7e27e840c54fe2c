"""LossFree moves the bias that a model has itself, and the model's own code chooses by it."""

import pytest
import torch
from torch import Tensor, nn

from simbal.balancing import (
    HashRouting,
    LoadBalancingLoss,
    LogitNorm,
    LossFree,
    QuantileBalancing,
    RouterZLoss,
    SimBal,
    UniformRouting,
)
from simbal.errors import UserError
from simbal.hf import attach
from tests.hf.architectures import RULE, E, K, architecture

B, S = 4, 8
BIASED = [name for name, (rule, _) in RULE.items() if rule.biased]


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(64, (B, S), generator=torch.Generator().manual_seed(seed))


def biases(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name.endswith("e_score_correction_bias")}


def with_bias(name: str) -> nn.Module:
    """A model whose biases are not zero."""
    model = architecture(name).train()
    draws = torch.Generator().manual_seed(1)
    for bias in biases(model).values():
        bias.copy_(torch.randn(bias.shape, generator=draws) / 10)
    return model


@pytest.mark.parametrize("name", BIASED)
def test_the_bias_moves_by_its_definition_in_the_model_itself(name):
    """DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): b -= u for an overloaded expert, b += u for an underloaded one."""
    model, given = with_bias(name), []
    expected = {key: bias.clone() for key, bias in biases(model).items()}
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda module, args: given.append(args[1]))
    with attach(model, LossFree(update_rate=0.03, bias_on="scores")) as balancing:
        assert len(expected) == len(balancing.routers)
        for step in range(3):
            given.clear()
            logits = model(tokens(step)).logits
            balancing.step()
            for bias, experts_NK in zip(expected.values(), given, strict=True):
                for expert in range(E):
                    load = int((experts_NK == expert).sum())
                    bias.view(-1)[expert] += 0.03 * ((load < B * S * K / E) - (load > B * S * K / E))
            torch.testing.assert_close(biases(model), expected)
            assert not torch.equal(model(tokens(step)).logits, logits)  # the model's own code chooses by it
            balancing.discard()


@pytest.mark.parametrize("name", BIASED)
def test_nothing_is_steered_and_what_was_learnt_stays(name):
    model = with_bias(name)
    plain, before = model(tokens()).logits, {key: bias.clone() for key, bias in biases(model).items()}
    with attach(model, [LossFree(bias_on="scores"), SimBal(), LoadBalancingLoss()]) as balancing:
        assert torch.equal(model(tokens()).logits, plain)
        balancing.step()
        learnt = model(tokens()).logits
    assert torch.equal(model(tokens()).logits, learnt)
    assert any(not torch.equal(bias, before[key]) for key, bias in biases(model).items())


@pytest.mark.parametrize("name", BIASED)
def test_its_load_evens_out(name):
    model = with_bias(name)
    loads = []
    with attach(model, LossFree(update_rate=0.02, bias_on="scores")) as balancing, torch.no_grad():
        for _ in range(80):
            with torch.enable_grad():
                model(tokens())
            loads.append(sum(float(routing.tokens_per_expert_E.max()) for routing in balancing.routings))
            balancing.step()
    assert min(loads[-10:]) < 0.8 * loads[0]


def test_the_models_bias_is_the_truth():
    """Weights that are loaded after attaching, and the state of another attachment."""
    source, target = with_bias("deepseek_v3"), architecture("deepseek_v3").train()
    with attach(target, {"lf": LossFree(update_rate=0.1, bias_on="scores")}) as balancing:
        target.load_state_dict(source.state_dict())
        bias_LE = balancing.state_dict()["strategies"]["strategies.lf.bias_LE"]
        assert torch.equal(bias_LE, torch.stack([*biases(source).values()]))
        target(tokens())
        balancing.step()
        moved = torch.stack([*biases(target).values()])
        assert 0 < (moved - torch.stack([*biases(source).values()])).abs().max() < 0.11
        state = balancing.state_dict()
    fresh = architecture("deepseek_v3")
    with attach(fresh, {"lf": LossFree(bias_on="scores")}) as balancing:
        balancing.load_state_dict(state)
    assert torch.equal(torch.stack([*biases(fresh).values()]), moved)


def test_a_model_that_is_moved_keeps_its_bias_in_step():
    """Buffers are other tensors after a cast or a move."""
    model = with_bias("deepseek_v3")
    with attach(model, LossFree(update_rate=0.1, bias_on="scores")) as balancing:
        model.double().float()
        before = torch.stack([*biases(model).values()])
        model(tokens())
        balancing.step()
        assert not torch.equal(torch.stack([*biases(model).values()]), before)


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_in_bf16_is_refused_and_the_sentence_says_what_helps(name):
    model = with_bias(name).bfloat16()
    with pytest.raises(UserError, match=r"half precision rounds away: .* m\.e_score"):
        attach(model, LossFree(bias_on="scores"))
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.data = module.e_score_correction_bias.data.float()
    with attach(model, LossFree(bias_on="scores")) as balancing:
        model(tokens())
        balancing.step()
    assert all(bias.dtype == torch.float32 for bias in biases(model).values())


@pytest.mark.parametrize("make", [QuantileBalancing, HashRouting, UniformRouting])
@pytest.mark.parametrize("name", BIASED)
def test_other_choosers_are_refused(name, make):
    with pytest.raises(UserError, match=r"chooses experts itself, .* LossFree\(bias_on='scores'\) can move their own"):
        attach(architecture(name), make())


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        (
            LossFree(),
            "LossFree: DeepseekV3ForCausalLM adds its bias to the scores after the gating: set bias_on='scores'",
        ),
        (LossFree(bias_on="scores", bias_dtype="bf16"), "bias_dtype='fp32'"),
    ],
)
def test_a_bias_that_is_used_otherwise_is_refused(strategy, sentence):
    with pytest.raises(UserError, match=sentence):
        attach(architecture("deepseek_v3"), strategy)


def test_groups_without_a_bias_leave_nothing_to_move():
    model = architecture("deepseek_v2", topk_method="group_limited_greedy", n_group=4, topk_group=1)
    with pytest.raises(UserError, match=r"choose by a rule of their own: .* groups=Groups[^;]*$"):
        attach(model, LossFree(bias_on="scores"))


@pytest.mark.parametrize("strategy", [LogitNorm(), LossFree(), HashRouting()])
def test_nothing_steers_a_router_that_draws(strategy):
    name = type(strategy).__name__
    with pytest.raises(
        UserError, match=f"{name} changes what routers decide, and those of PhimoeForCausalLM draw their"
    ):
        attach(architecture("phimoe"), strategy)


def test_of_a_router_that_draws_that_is_recorded_which_it_drew():
    model, given = architecture("phimoe").train(), []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda module, args: given.append(args[1]))
    with attach(model, [RouterZLoss(), LoadBalancingLoss(choice="biased")]) as balancing:
        for seed in range(5):
            given.clear()
            model(tokens(seed))
            for routing, experts_NK in zip(balancing.routings, given, strict=True):
                assert torch.equal(routing.topk_experts_NK, experts_NK)
                assert torch.equal(
                    routing.unsteered_experts_NK.sort().values, routing.logits_NE.topk(K).indices.sort().values
                )


@pytest.mark.parametrize("name", [*BIASED, "deepseek_v2"])
def test_logits_are_adjusted_under_any_rule(name):
    """Under the model's groups and bias, which go on to choose."""
    changes = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1} if name == "deepseek_v2" else {}
    model = architecture(name, **changes)
    with attach(model, LogitNorm(2.0)) as balancing:
        model(tokens())
        for router, routing in zip(balancing.routers, balancing.routings, strict=True):
            torch.testing.assert_close(routing.logits_NE.std(-1, unbiased=False), torch.full((B * S,), 2.0))
            experts_NK, weights_NK = router.rule.decide(routing.logits_NE, K, router.bias_E)
            assert torch.equal(routing.topk_experts_NK, experts_NK)
            torch.testing.assert_close(routing.topk_probs_NK, weights_NK)
