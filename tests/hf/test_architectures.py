"""Every architecture in the guide's table has the rule, and can be attached and trained, as the table says."""

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter

from simbal.balancing import LoadBalancingLoss, LossFree, RouterZLoss, SimBal
from simbal.errors import UserError
from simbal.hf import attach
from simbal.hf.convert import ARCHITECTURES
from simbal.hf.routers import Rule, find_routers, probe
from tests.hf.architectures import NAMES, RULE, E, K, architecture, batch, biases, host
from tests.hf.measured import guide
from tests.hf.test_measured import UNSUITED

STEPS = 20


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_rule_of_a_router_is_found_and_decides_as_the_router_does(name):
    """Checked with the model's own weights and a nonzero bias, which the probe does not use."""
    model, seen = architecture(name), []
    routers = find_routers(model)
    assert {(router.rule, router.top_k, *router.weight_ED.shape) for router in routers} == {(RULE[name][0], K, E, 32)}
    assert [router.layer for router in routers] == [*range(len(routers))]
    router = routers[-1]
    if router.bias is not None:
        torch.nn.init.normal_(router.bias, std=0.2)
    router.module.register_forward_hook(lambda module, args, output: seen.extend(output))
    model(**batch(1))
    logits_NE, weights_NK, experts_NK = (tensor.flatten(0, -2) for tensor in seen)
    chosen_NK, ours_NK = router.rule.decide(logits_NE, K, router.bias_E)
    ours_NE, theirs_NE = (
        torch.zeros(len(logits_NE), E).scatter(1, *pair) for pair in ((chosen_NK, ours_NK), (experts_NK, weights_NK))
    )
    torch.testing.assert_close(ours_NE, theirs_NE, rtol=1e-4, atol=1e-5)


def test_the_router_of_deepseek_v4_is_recognized_as_sqrtsoftplus():
    config = DeepseekV4Config(hidden_size=8, num_local_experts=E, num_experts_per_tok=K, num_hidden_layers=1)
    router = DeepseekV4TopKRouter(config)
    found = probe(router, "weight", router.e_score_correction_bias)
    assert found == (Rule("sqrtsoftplus", renormalize=True, scale=1.5, biased=True), K)


def table() -> dict[str, str]:
    """Return the rows of the guide's table by architecture."""
    lines = guide().partition("| architecture |")[2].partition("\n\n")[0].splitlines()
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def test_the_guide_lists_every_architecture_with_its_exceptions():
    rows, ours = table(), {each.model_type for each in ARCHITECTURES}
    assert rows.keys() == RULE.keys()
    for name, (rule, _) in RULE.items():
        assert rule.gating in rows[name]
        assert ("LossFree" in rows[name]) != rule.samples_in_training
        assert ("exported" in rows[name]) == (name in ours)
        for analysis in ("counterfactual", "dropping", "margin", "route_agreement"):
            assert (f"`{analysis}`" in rows[name]) == (analysis in UNSUITED.get(name, ()))


@pytest.mark.parametrize("name", NAMES)
def test_losses_fall_and_every_router_gets_a_gradient(name):
    model, rule = host(name), RULE[name][0]
    strategies = {"simbal": SimBal(), "lbl": LoadBalancingLoss(coef=0.1), "z": RouterZLoss(0.01)}
    if rule.samples_in_training:
        with pytest.raises(UserError, match="samples experts in training"):
            attach(model, LossFree())
    else:
        strategies["lf"] = LossFree(update_rate=0.05, bias_on="scores" if rule.biased else "logits")
    first, before = {}, {key: bias.clone() for key, bias in biases(model).items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with attach(model, strategies) as balancing:
        for _ in range(STEPS):
            loss = model(**batch()).loss
            terms = {key: term.item() for key, term in balancing.losses().items()} | {"loss": loss.item()}
            (loss + balancing.loss()).backward()
            assert all(router.weight_ED.grad.abs().sum() > 0 for router in balancing.routers)
            optimizer.step()
            optimizer.zero_grad()
            balancing.step()
            first = first or terms
    assert all(last < first[key] for key, last in terms.items())
    moved = any(not torch.equal(bias, before[key]) for key, bias in biases(model).items())
    assert moved == rule.biased
