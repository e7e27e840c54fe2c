"""Under LoRA, routers are found inside peft's wrappers, and a loss trains the copy that peft trains."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from simbal.balancing import LoadBalancingLoss, LossFree, RouterZLoss, SimBal
from simbal.errors import UserError
from simbal.hf import attach
from tests.hf.architectures import architecture, batch, biases

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft


def lora(name: str, **keys: object) -> PeftModel:
    return get_peft_model(architecture(name), LoraConfig(r=4, target_modules=["q_proj", "o_proj"], **keys)).train()


def trained_routers(model: nn.Module, router: str) -> list[nn.Parameter]:
    ends = (f"{router}.modules_to_save.default.weight", f"modules_to_save.default.{router}.weight")
    return [weight for key, weight in model.named_parameters() if key.endswith(ends)]


@pytest.mark.parametrize(
    ("name", "router", "keys"),
    [
        ("mixtral", "gate", {}),
        ("mixtral", "gate", {"modules_to_save": ["mlp"]}),
        ("qwen3_moe", "gate", {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
        ("gpt_oss", "router", {}),
    ],
)
def test_losses_reach_the_trained_routers_and_no_frozen_weight(name, router, keys):
    model = lora(name, **{"modules_to_save": [router]} | keys)
    with attach(model, [SimBal(), LoadBalancingLoss(), RouterZLoss()]) as balancing:
        assert {id(router.weight_ED) for router in balancing.routers} == {*map(id, trained_routers(model, router))}
        (model(**batch()).loss + balancing.loss()).backward()
    assert all(weight_ED.grad.abs().sum() > 0 for weight_ED in trained_routers(model, router))
    assert all(weight.grad is None for weight in model.parameters() if not weight.requires_grad)


def test_the_bias_of_the_active_copy_is_updated_and_saved(tmp_path):
    model = lora("deepseek_v3", modules_to_save=["gate"])
    with attach(model, LossFree(update_rate=0.1, bias_on="scores")) as balancing:
        model(**batch())
        balancing.step()
        updated = torch.stack([router.bias_E for router in balancing.routers])
    assert not any(bias.any() for name, bias in biases(model).items() if "original_module" in name)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(architecture("deepseek_v3"), tmp_path)
    saved = [bias for name, bias in biases(again).items() if "modules_to_save" in name]
    assert torch.equal(torch.stack(saved), updated)
    assert updated.any()


def test_lora_on_the_router_itself_is_refused():
    with pytest.raises(UserError, match=r"LoraConfig\(modules_to_save=\['gate'\]\)"):
        attach(lora("mixtral", target_parameters=["mlp.gate.weight"]), SimBal())


def test_with_the_adapter_disabled_the_original_routers_run():
    model = lora("mixtral", modules_to_save=["gate"])
    with model.disable_adapter(), attach(model, RouterZLoss()) as balancing:
        assert not any(router.weight_ED.requires_grad for router in balancing.routers)
        model(**batch())
        assert balancing.loss() > 0
