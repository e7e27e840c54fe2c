"""Update e_score_correction_bias of a tiny DeepSeek-V3, which transformers never does. Takes seconds on a CPU."""

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from simbal.balancing import LossFree
from simbal.hf import attach, describe
from simbal.metrics.routing import max_vio

SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 3}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
torch.manual_seed(0)
config = DeepseekV3Config(
    vocab_size=256, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=16, num_experts_per_tok=2,
    n_group=4, topk_group=2, first_k_dense_replace=1, initializer_range=0.1, **SIZES, **LATENT,
)  # fmt: skip
model = DeepseekV3ForCausalLM(config)
print(describe(model))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.tensor(list(b"The bias of an expert falls where its load is high. " * 10))  # one token per byte
batch = {"input_ids": text[:512].view(16, 32), "labels": text[:512].view(16, 32)}
model.train()
with attach(model, LossFree(update_rate=0.01, bias_on="scores")) as balancing:
    for step in range(60):
        (model(**batch).loss + balancing.loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, 59):
            print(f"step {step}: MaxVio {max_vio(balancing.counts_LE).mean().item():.2f}")
        balancing.step()
bias = model.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"]
print("saved with the model:", *(f"{number:.2f}" for number in bias))
