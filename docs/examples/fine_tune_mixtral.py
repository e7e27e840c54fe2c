"""Fine-tune a tiny Mixtral with SimBal: router rows become orthonormal. Takes seconds on a CPU."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from simbal.balancing import SimBal
from simbal.hf import attach
from simbal.metrics.similarity import mean_deviation

STEPS = 100
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 8}
model = MixtralForCausalLM(MixtralConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=4, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
text = torch.tensor(list(b"The rows of the router become orthonormal. " * 8))  # one token per byte
batch = {"input_ids": text[:256].view(8, 32), "labels": text[:256].view(8, 32)}

model.train()
with attach(model, SimBal(coef=0.1)) as balancing:

    def report(when: str) -> None:
        """Print the mean of |W W^T - I| for each router; 0 means orthonormal rows."""
        deviations = [mean_deviation(router.weight_ED, torch.float32).item() for router in balancing.routers]
        print(when, *(f"{deviation:.5f}" for deviation in deviations))

    report("before:")
    for _ in range(STEPS):
        (model(**batch).loss + balancing.loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        balancing.step()
    report("after:")
