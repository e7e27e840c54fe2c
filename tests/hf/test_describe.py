"""The doctor finds by running what a model's code does about balance, whatever its settings say."""

import sys
import types

import pytest
import torch
from torch import nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from simbal.balancing import SimBal
from simbal.hf import attach, describe
from simbal.hf.describe import Experiment
from tests.hf.architectures import RULE, E, K, architecture
from tests.hf.test_model_bias import tokens

WITH_LOSS = [
    "mixtral", "olmoe", "flex_olmo", "qwen2_moe", "qwen3_moe", "ernie4_5_moe", "minimax_m2", "gpt_oss", "granitemoe",
    "phimoe",
]  # fmt: skip
WITHOUT = [name for name in RULE if name not in WITH_LOSS]
FEW = ["mixtral", "granitemoe"]


@pytest.mark.parametrize("name", WITH_LOSS)
def test_a_loss_that_the_settings_leave_off(name):
    found = describe(architecture(name))
    assert "config.output_router_logits is False" in found["off"].fact
    assert "model.router_aux_loss_coef = 0.001" in found["off"].fact or name in ("olmoe", "flex_olmo")
    assert "it is model.router_aux_loss_coef x E sum_i f_i P_i over the tokens of all layers" in found["formula"].fact
    assert f"among the {K} largest logits, P_i: mean softmax" in found["formula"].fact
    for kind in ("pooled", "factor_k", "mask", "accumulation", "gradient", "config_is_deaf"):
        assert kind in found
    for kind in ("on", "zero", "padding", "no_gradient", "no_loss", "unknown", "frozen"):
        assert kind not in found
    assert ("other_gating" in found) == (name == "minimax_m2")
    assert ("idle_bias" in found) == (name in ("minimax_m2", "ernie4_5_moe"))


@pytest.mark.parametrize("name", WITHOUT)
def test_a_model_without_a_loss(name):
    found = describe(architecture(name, **{"output_router_logits": True} if name == "glm4_moe" else {}))
    assert "whatever its settings" in found["no_loss"].fact
    assert {finding.kind for finding in found.findings} <= {"no_loss", "idle_bias"}
    assert ("idle_bias" in found) == RULE[name][0].biased


@pytest.mark.parametrize("name", FEW)
def test_a_loss_that_is_on(name):
    found = describe(architecture(name, output_router_logits=True, router_aux_loss_coef=0.25))
    assert found["on"].fact == "its auxiliary loss is added to the loss, with model.router_aux_loss_coef = 0.25"
    assert "off" not in found


@pytest.mark.parametrize("name", FEW)
def test_a_coefficient_of_zero(name):
    found = describe(architecture(name, output_router_logits=True, router_aux_loss_coef=0.0))
    assert found["zero"].fact == "its auxiliary loss adds nothing: model.router_aux_loss_coef is 0"
    assert "off" not in found


def test_what_is_taken_for_the_loss_is_what_transformers_adds():
    model = architecture("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    experiment = Experiment(model)
    for batch in experiment.batches():
        added = float(experiment.observe(batch).added.detach())
        with torch.no_grad():
            logits = model(**batch, output_router_logits=True).router_logits
        assert added == pytest.approx(
            0.5 * float(load_balancing_loss_func(logits, E, K, batch["attention_mask"])), rel=1e-5
        )


def with_loss(monkeypatch: pytest.MonkeyPatch, change) -> nn.Module:
    """A Mixtral whose code computes its loss otherwise, as `change` does from logits by layer, E, K and the mask."""
    model = architecture("mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
    monkeypatch.setattr(sys.modules[type(model).__module__], "load_balancing_loss_func", change)
    return model


def test_padding_that_counts(monkeypatch):
    found = describe(with_loss(monkeypatch, lambda logits, e, k, mask: load_balancing_loss_func(logits, e, k, None)))
    assert "padding counts as tokens" in found["padding"].fact
    assert "mask" not in found


def test_a_loss_by_layer_and_with_one_factor_less(monkeypatch):
    def by_layer(logits, e, k, mask):
        return torch.stack([load_balancing_loss_func((layer_NE,), e, k, mask) for layer_NE in logits]).mean() / k

    found = describe(with_loss(monkeypatch, by_layer))
    assert "x 0.5 x E sum_i f_i P_i of each layer, averaged over layers" in found["formula"].fact
    assert "factor_k" not in found
    assert "pooled" not in found
    assert "mask" in found


def test_a_loss_that_is_none_of_the_known(monkeypatch):
    def entropy(logits, e, k, mask):
        return torch.stack([-(p := layer_NE.softmax(-1)).xlogy(p).sum(-1).mean() for layer_NE in logits]).mean()

    found = describe(with_loss(monkeypatch, entropy))
    assert "is no known reading of the load balancing loss" in found["unknown"].fact
    assert "gradient" in found


def test_a_loss_without_a_gradient(monkeypatch):
    """Reentrant checkpointing drops it; and logits that someone has detached."""
    model = architecture("mixtral", output_router_logits=True)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    found = describe(model)
    assert found["no_gradient"].fact == "its gradient reaches 0 of 3 routers, and balances no other"
    assert "{'use_reentrant': False}" in found["no_gradient"].advice
    assert "formula" in found
    detached = lambda logits, *given: load_balancing_loss_func((logits[0], *(x.detach() for x in logits[1:])), *given)  # noqa: E731
    assert "1 of 3 routers" in describe(with_loss(monkeypatch, detached))["no_gradient"].fact


@torch.no_grad()
def test_the_loss_does_count_once_a_micro_batch():
    """What `accumulation` says: the parts of a step sum to its cross-entropy, and to G times its auxiliary loss."""
    model = architecture("mixtral", output_router_logits=True, router_aux_loss_coef=1.0)
    batch = tokens()
    found = {}
    for coefficient in (0.0, 1.0):
        model.router_aux_loss_coef = coefficient
        parts = [model(input_ids=x, labels=x, num_items_in_batch=torch.tensor(28)).loss for x in batch.split(1)]
        found[coefficient] = float(sum(parts))
    alone = [float(load_balancing_loss_func(model(input_ids=x).router_logits, E, K)) for x in batch.split(1)]
    assert found[1.0] - found[0.0] == pytest.approx(sum(alone), rel=1e-5)  # and not their mean


def test_frozen_routers():
    model = architecture("mixtral")
    model.requires_grad_(False)
    found = describe(model)
    assert "the weights of all routers are frozen" in found["frozen"].fact
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_bias_that_training_moves(monkeypatch):
    model = architecture("deepseek_v3")
    router = model.model.layers[1].mlp.gate
    forward = type(router).forward

    def moving(self, hidden_states):
        if self.training:
            self.e_score_correction_bias += 0.01
        return forward(self, hidden_states)

    router.forward = types.MethodType(moving, router)
    before = router.e_score_correction_bias.clone()
    assert (
        "training moves the bias on the choice of experts of model.layers.1.mlp.gate"
        in describe(model)["moving_bias"].fact
    )
    assert torch.equal(router.e_score_correction_bias, before)


@pytest.mark.parametrize("name", ["mixtral", "ernie4_5_moe", "phimoe"])
@pytest.mark.parametrize("train", [True, False])
def test_the_model_is_left_as_it_was(name, train):
    model = architecture(name).train(train)
    model.model.embed_tokens.requires_grad_(False)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    gradients = {key: None if w.grad is None else w.grad.clone() for key, w in model.named_parameters()}
    config, drawn = model.config.to_dict(), torch.random.get_rng_state()
    frozen = [key for key, parameter in model.named_parameters() if not parameter.requires_grad]
    describe(model)
    assert model.training == train
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    for key, weight in model.named_parameters():
        assert (weight.grad is None) == (gradients[key] is None)
        assert weight.grad is None or torch.equal(weight.grad, gradients[key])
    assert config == model.config.to_dict()
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert frozen == [key for key, parameter in model.named_parameters() if not parameter.requires_grad]
    attach(model, SimBal()).detach()
