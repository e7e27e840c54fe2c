"""`describe` reports how a model's code balances the load, by running it."""

import sys
import types

import pytest
import torch
from torch import nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from simbal.balancing import LossFree, SimBal
from simbal.hf import attach, describe
from tests.hf.architectures import NAMES, RULE, E, K, architecture, batch

WITH_LOSS = [
    "mixtral", "olmoe", "flex_olmo", "qwen2_moe", "qwen3_moe", "ernie4_5_moe", "minimax_m2", "gpt_oss", "granitemoe",
    "phimoe",
]  # fmt: skip


def facts(model: nn.Module) -> dict[str, str]:
    return {finding.kind: finding.fact for finding in describe(model).findings}


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_that_is_off_by_default_or_missing_is_reported(name):
    if name not in WITH_LOSS:
        found = facts(architecture(name, **{"output_router_logits": True} if name == "glm4_moe" else {}))
        assert found.keys() == {"no_loss"} | ({"idle_bias"} if RULE[name][0].biased else set())
        return
    found = facts(architecture(name))
    assert "config.output_router_logits is False" in found["off"]
    assert "model.router_aux_loss_coef x E sum_i f_i P_i over the tokens of all layers" in found["formula"]
    assert f"among the {K} largest logits, P_i: mean softmax" in found["formula"]
    expected = {"off", "formula", "pooled", "factor_k", "mask", "accumulation", "gradient", "config_ignored"}
    expected |= {"other_gating"} if name == "minimax_m2" else set()
    expected |= {"idle_bias"} if name in ("minimax_m2", "ernie4_5_moe") else set()
    assert found.keys() == expected


def test_a_loss_that_is_on_and_a_coefficient_of_zero_are_reported():
    found = facts(architecture("mixtral", output_router_logits=True, router_aux_loss_coef=0.25))
    assert "model.router_aux_loss_coef = 0.25" in found["on"]
    assert "off" not in found
    found = facts(architecture("mixtral", output_router_logits=True, router_aux_loss_coef=0.0))
    assert "model.router_aux_loss_coef is 0" in found["zero"]
    assert not {"on", "off"} & found.keys()


def with_loss(monkeypatch: pytest.MonkeyPatch, loss) -> nn.Module:
    """Return a Mixtral with another auxiliary loss, a function of the logits by layer, E, K and the mask."""
    model = architecture("mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
    monkeypatch.setattr(sys.modules[type(model).__module__], "load_balancing_loss_func", loss)
    return model


def test_a_loss_that_counts_padding_is_reported(monkeypatch):
    found = facts(with_loss(monkeypatch, lambda logits, e, k, mask: load_balancing_loss_func(logits, e, k, None)))
    assert "padding" in found
    assert "mask" not in found


def test_a_loss_per_layer_is_reported_with_its_factor(monkeypatch):
    def per_layer(logits, e, k, mask):
        return torch.stack([load_balancing_loss_func((layer_NE,), e, k, mask) for layer_NE in logits]).mean() / k

    found = facts(with_loss(monkeypatch, per_layer))
    assert "x 0.5 x E sum_i f_i P_i for each layer, averaged over layers" in found["formula"]
    assert not {"factor_k", "pooled"} & found.keys()
    assert "mask" in found


def test_an_unknown_loss_is_reported_with_its_gradient(monkeypatch):
    def entropy(logits, e, k, mask):
        return torch.stack([-(p := layer_NE.softmax(-1)).xlogy(p).sum(-1).mean() for layer_NE in logits]).mean()

    assert {"unknown", "gradient"} <= facts(with_loss(monkeypatch, entropy)).keys()


def test_a_loss_without_a_gradient_is_reported(monkeypatch):
    model = architecture("mixtral", output_router_logits=True)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    found = facts(model)
    assert "0 of 3 routers" in found["no_gradient"]
    assert "formula" in found

    def detached(logits, *others):
        return load_balancing_loss_func((logits[0], *(layer_NE.detach() for layer_NE in logits[1:])), *others)

    assert "1 of 3 routers" in facts(with_loss(monkeypatch, detached))["no_gradient"]


@torch.no_grad()
def test_the_loss_counts_once_per_micro_batch_as_described():
    model, tokens = architecture("mixtral", output_router_logits=True), batch(sequences=4)["input_ids"]
    totals = {}
    for coefficient in (0.0, 1.0):
        model.router_aux_loss_coef = coefficient
        parts = [model(input_ids=x, labels=x, num_items_in_batch=torch.tensor(28)).loss for x in tokens.split(1)]
        totals[coefficient] = float(sum(parts))
    each = [float(load_balancing_loss_func(model(input_ids=x).router_logits, E, K)) for x in tokens.split(1)]
    assert totals[1.0] - totals[0.0] == pytest.approx(sum(each), rel=1e-5)  # not their mean


def test_a_bias_that_training_changes_is_reported():
    model = architecture("deepseek_v3")
    router = model.model.layers[1].mlp.gate
    forward = type(router).forward

    def moving(self, hidden_states):
        if self.training:
            self.e_score_correction_bias += 0.01
        return forward(self, hidden_states)

    router.forward = types.MethodType(moving, router)
    before = router.e_score_correction_bias.clone()
    assert "model.layers.1.mlp.gate" in facts(model)["moving_bias"]
    assert torch.equal(router.e_score_correction_bias, before)


@pytest.mark.parametrize(("name", "train"), [("mixtral", True), ("ernie4_5_moe", False), ("phimoe", True)])
def test_the_model_is_left_unchanged(name, train):
    model = architecture(name).train(train)
    model.model.embed_tokens.requires_grad_(False)
    model(**batch()).loss.backward()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    gradients = {key: None if w.grad is None else w.grad.clone() for key, w in model.named_parameters()}
    config, rng_state = model.config.to_dict(), torch.random.get_rng_state()
    frozen = [key for key, parameter in model.named_parameters() if not parameter.requires_grad]
    describe(model)
    assert model.training == train
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    for key, weight in model.named_parameters():
        assert (weight.grad is None) == (gradients[key] is None)
        assert weight.grad is None or torch.equal(weight.grad, gradients[key])
    assert config == model.config.to_dict()
    assert torch.equal(rng_state, torch.random.get_rng_state())
    assert frozen == [key for key, parameter in model.named_parameters() if not parameter.requires_grad]
    attach(model, SimBal()).detach()


def test_attached_strategies_are_ignored_and_frozen_routers_reported():
    model = architecture("mixtral")
    model.requires_grad_(False)
    expected = str(describe(model))
    assert "all router weights are frozen" in expected
    with attach(model, LossFree(update_rate=1.0)) as balancing:
        model.train()(**batch())
        assert str(describe(model)) == expected
        assert balancing.micro_batches == 1  # its own pass
    assert not any(parameter.requires_grad for parameter in model.parameters())
