"""`describe` reports how a model's code balances the load, by running it."""

import sys
import types

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from simbal.balancing import LossFree
from simbal.hf import attach, describe
from tests.hf.architectures import NAMES, RULE, K, architecture, batch

WITHOUT_LOSS = (
    "afmoe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "hunyuan_v1_moe",
    "kimi_linear",
    "nemotron_h",
    "longcat_flash",
    "glm_moe_dsa",
    "lfm2_moe",
)


def facts(model: nn.Module) -> dict[str, str]:
    return {finding.kind: finding.fact for finding in describe(model).findings}


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_that_is_off_by_default_or_missing_is_reported(name):
    if name in WITHOUT_LOSS:
        found = facts(architecture(name, **{"output_router_logits": True} if name == "glm4_moe" else {}))
        assert found.keys() == {"no_loss"} | ({"idle_bias"} if RULE[name][0].biased else set())
        return
    found = facts(architecture(name))
    assert "config.output_router_logits is False" in found["off"]
    assert "model.router_aux_loss_coef x E sum_i f_i P_i over the tokens of all layers" in found["formula"]
    assert f"among the {K} largest logits, P_i: mean softmax" in found["formula"]
    expected = {"off", "formula", "pooled", "factor_k", "mask", "accumulation", "gradient", "config_ignored", "trl"}
    expected |= {"other_gating"} if name in ("minimax_m2", "deepseek_v4") else set()
    expected |= {"idle_bias"} if name in ("minimax_m2", "ernie4_5_moe", "deepseek_v4") else set()
    assert found.keys() == expected


def test_a_loss_that_is_on_and_a_coefficient_of_zero_are_reported():
    found = facts(architecture("mixtral", output_router_logits=True, router_aux_loss_coef=0.25))
    assert "model.router_aux_loss_coef = 0.25" in found["on"]
    found = facts(architecture("mixtral", output_router_logits=True, router_aux_loss_coef=0.0))
    assert not {"on", "off", "trl"} & found.keys()
    assert "model.router_aux_loss_coef is 0" in found["zero"]


def with_padding(logits, e, k, mask):
    return load_balancing_loss_func(logits, e, k, None)


def per_layer(logits, e, k, mask):
    return torch.stack([load_balancing_loss_func((layer_NE,), e, k, mask) for layer_NE in logits]).mean() / k


def entropy(logits, e, k, mask):
    return torch.stack([-(p := layer_NE.softmax(-1)).xlogy(p).sum(-1).mean() for layer_NE in logits]).mean()


def of_softmax(logits, *others):
    """As in transformers issue 45120, where the routers returned probabilities as logits."""
    return load_balancing_loss_func(tuple(layer_NE.softmax(-1) for layer_NE in logits), *others)


def partly_detached(logits, *others):
    return load_balancing_loss_func((logits[0], *(layer_NE.detach() for layer_NE in logits[1:])), *others)


@pytest.mark.parametrize(
    ("loss", "kinds", "part"),
    [
        (with_padding, {"formula", "factor_k", "pooled", "gradient", "padding"}, "padding counts as tokens"),
        (per_layer, {"formula", "gradient", "mask"}, "x 0.5 x E sum_i f_i P_i for each layer, averaged over layers"),
        (entropy, {"unknown", "gradient"}, "not a known form"),
        (of_softmax, {"formula", "factor_k", "pooled", "gradient", "mask", "double_softmax"}, "the softmax of the log"),
        (partly_detached, {"formula", "factor_k", "pooled", "no_gradient", "mask"}, "1 of 3 routers"),
    ],
)
def test_another_loss_is_described_by_what_it_computes(monkeypatch, loss, kinds, part):
    model = architecture("mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
    monkeypatch.setattr(sys.modules[type(model).__module__], "load_balancing_loss_func", loss)
    description = describe(model)
    others = {"on", "accumulation", "config_ignored", "trl"}
    assert {finding.kind for finding in description.findings} == kinds | others
    assert part in str(description)


def test_the_loss_grows_with_micro_batches_and_ranks_as_reported(tmp_path, monkeypatch):
    """In the Trainer, two ranks or two micro-batches double the gradient of this loss and keep the cross-entropy's."""
    model, inputs = architecture("mixtral", output_router_logits=True, router_aux_loss_coef=0.5).train(), batch()
    assert "G x R times as strong" in facts(model)["accumulation"]
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    labels, found = inputs["labels"][:, 1:].numel(), {}
    for ranks in (1, 2):
        trainer = Trainer(model=model, args=args)
        monkeypatch.setattr(type(trainer.accelerator), "num_processes", ranks)
        for coefficient in (0.0, 0.5):
            model.router_aux_loss_coef = coefficient
            found[ranks, coefficient] = trainer.compute_loss(model, inputs, num_items_in_batch=labels * ranks).item()
    assert found[2, 0.0] == pytest.approx(found[1, 0.0])  # the mean over ranks
    auxiliary = {ranks: found[ranks, 0.5] - found[ranks, 0.0] for ranks in (1, 2)}
    assert auxiliary[2] == pytest.approx(2 * auxiliary[1], rel=1e-4)


def test_the_coefficient_that_trl_turns_on_is_reported():
    """trl 1.16's trainers use config.router_aux_loss_coef unless they get another one; deepseek_v3 has none."""
    found = facts(architecture("qwen3_moe", router_aux_loss_coef=0.25))
    assert "config.router_aux_loss_coef = 0.25, whatever config.output_router_logits says" in found["trl"]
    assert "trl" not in facts(architecture("deepseek_v3"))


def test_a_gradient_that_checkpointing_drops_is_reported():
    model = architecture("mixtral", output_router_logits=True)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    assert "0 of 3 routers" in facts(model)["no_gradient"]


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
    gradients = {key: w.grad.clone() for key, w in model.named_parameters() if w.grad is not None}
    config, rng_state = model.config.to_dict(), torch.random.get_rng_state()
    frozen = [key for key, parameter in model.named_parameters() if not parameter.requires_grad]
    describe(model)
    assert model.training == train
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    torch.testing.assert_close({key: w.grad for key, w in model.named_parameters() if w.grad is not None}, gradients)
    assert config == model.config.to_dict()
    assert torch.equal(rng_state, torch.random.get_rng_state())
    assert frozen == [key for key, parameter in model.named_parameters() if not parameter.requires_grad]


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
