"""Under peft's LoRA the routers are found through its wrappers, and a loss trains the copy that peft trains."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from simbal.balancing import LoadBalancingLoss, LossFree, RouterZLoss, SimBal
from simbal.errors import UserError
from simbal.hf import attach
from tests.hf.architectures import architecture
from tests.hf.test_model_bias import biases, tokens

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft

ROUTER = {"mixtral": "gate", "qwen3_moe": "gate", "deepseek_v3": "gate", "minimax_m2": "gate", "gpt_oss": "router"}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def lora(name: str, **keys: object) -> PeftModel:
    return get_peft_model(architecture(name), LoraConfig(r=4, target_modules=["q_proj", "o_proj"], **keys)).train()


def routers(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    ends = (f"{ROUTER[name]}.modules_to_save.default.weight", f"modules_to_save.default.{ROUTER[name]}.weight")
    return {key: weight for key, weight in model.named_parameters() if key.endswith(ends)}


@pytest.mark.parametrize(
    "keys", [{}, {"target_parameters": EXPERTS}, {"modules_to_save": ["mlp"]}], ids=["attention", "experts", "blocks"]
)
@pytest.mark.parametrize("name", ROUTER)
def test_a_loss_reaches_the_trained_routers_and_no_frozen_weight(name, keys):
    model = lora(name, **{"modules_to_save": [ROUTER[name]]} | keys)
    with attach(model, [SimBal(), LoadBalancingLoss(), RouterZLoss()]) as balancing:
        assert {id(router.weight_ED) for router in balancing.routers} == {*map(id, routers(model, name).values())}
        loss = model(input_ids=tokens(), labels=tokens()).loss + balancing.loss()
        loss.backward()
    assert all(weight_ED.grad.abs().sum() > 0 for weight_ED in routers(model, name).values())
    assert all(weight.grad is None for weight in model.parameters() if not weight.requires_grad)


def test_the_loss_is_that_of_the_model_without_lora():
    """A new LoRA changes nothing, and the trained copy begins as the router."""
    plain, found = architecture("mixtral").train(), []
    for model in (plain, lora("mixtral", modules_to_save=["gate"])):
        with attach(model, [SimBal(), LoadBalancingLoss()]) as balancing:
            model(input_ids=tokens())
            found.append(balancing.losses())
    torch.testing.assert_close(found[0], found[1])


def test_a_router_that_is_made_trainable_by_hand():
    model = lora("mixtral")
    with pytest.raises(UserError, match="all of them are frozen: set their requires_grad"):
        attach(model, SimBal())
    for key, weight in model.named_parameters():
        if key.endswith("mlp.gate.weight"):
            weight.requires_grad_(True)
    with attach(model, SimBal()) as balancing:
        model(input_ids=tokens())
        balancing.loss().backward()
        assert all(router.weight_ED.grad.abs().sum() > 0 for router in balancing.routers)


def test_the_bias_of_the_copy_that_runs_is_moved_and_saved(tmp_path):
    model = lora("deepseek_v3", modules_to_save=["gate"])
    with attach(model, LossFree(update_rate=0.1, bias_on="scores")) as balancing:
        model(input_ids=tokens())
        balancing.step()
        learnt = torch.stack([router.bias_E for router in balancing.routers])
    assert {bool(bias.any()) for name, bias in biases(model).items() if "original_module" in name} == {False}
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(architecture("deepseek_v3"), tmp_path)
    saved = [bias for name, bias in biases(again).items() if "modules_to_save" in name]
    assert torch.equal(torch.stack(saved), learnt)
    assert learnt.any()


def test_lora_on_the_router_itself_is_refused():
    with pytest.raises(UserError, match=r"mlp.gate is under LoRA, .* LoraConfig\(modules_to_save=\['gate'\]\)"):
        attach(lora("mixtral", target_parameters=["mlp.gate.weight"]), SimBal())


def test_with_its_adapter_off_the_model_runs_its_first_routers():
    model = lora("mixtral", modules_to_save=["gate"])
    with model.disable_adapter(), attach(model, RouterZLoss()) as balancing:
        assert not any(router.weight_ED.requires_grad for router in balancing.routers)
        model(input_ids=tokens())
        assert balancing.loss() > 0
