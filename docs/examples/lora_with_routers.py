"""Fine-tune a tiny Qwen3-MoE with LoRA, and its routers fully with SimBal. Takes seconds on a CPU.

Without `modules_to_save` the routers are frozen, and SimBal is refused.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from simbal.balancing import LoadBalancingLoss, SimBal
from simbal.hf import attach
from simbal.metrics.similarity import mean_deviation

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
}
torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=256, num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, **SIZES
)
lora = LoraConfig(
    r=8,
    target_modules=["q_proj", "v_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    modules_to_save=["gate"],
)
model = get_peft_model(Qwen3MoeForCausalLM(config), lora)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
text = torch.tensor(list(b"Few numbers are trained, and all of the routers. " * 8))  # one token per byte
batch = {"input_ids": text[:256].view(8, 32), "labels": text[:256].view(8, 32)}

model.train()
with attach(model, [SimBal(coef=0.1), LoadBalancingLoss(coef=0.01)]) as balancing:
    for step in range(100):
        loss = model(**batch).loss
        (loss + balancing.loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        balancing.step()
        if step in (0, 99):
            deviations = [mean_deviation(router.weight_ED, torch.float32).item() for router in balancing.routers]
            print(f"step {step}: loss {loss.item():.3f}, mean |W W^T - I|", *(f"{number:.4f}" for number in deviations))
