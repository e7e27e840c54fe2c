"""Fine-tune a tiny OLMoE with SimBal and LossFree in transformers' Trainer, then resume from a checkpoint.

Needs accelerate: `pip install 'simbal[hf]'`. Takes seconds on a CPU.
"""

from tempfile import mkdtemp

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM, Trainer, TrainingArguments

from simbal.balancing import LossFree, SimBal
from simbal.hf.trainer import attach_trainer

FOLDER = mkdtemp()
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
TEXT = torch.tensor(list(b"A bias evens the load of the experts. " * 40))  # one token per byte


def build_trainer() -> Trainer:
    """Return a Trainer with both strategies attached."""
    torch.manual_seed(0)
    model = OlmoeForCausalLM(
        OlmoeConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=4, eos_token_id=None, **SIZES)
    )
    data = [{"input_ids": piece_S, "labels": piece_S} for piece_S in TEXT[:1500].view(-1, 30)]
    args = TrainingArguments(
        FOLDER, max_steps=40, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=5e-3,
        logging_steps=20, save_steps=20, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args, train_dataset=data)
    attach_trainer(trainer, [SimBal(coef=0.1), LossFree(update_rate=0.01)])
    return trainer


uninterrupted = build_trainer()
uninterrupted.train()
resumed = build_trainer()
resumed.train(resume_from_checkpoint=f"{FOLDER}/checkpoint-20")
for row in uninterrupted.state.log_history[:2]:
    print({key: round(row[key], 3) for key in ("step", "loss", "aux/SimBal", "max_vio")})
pairs = zip(uninterrupted.model.parameters(), resumed.model.parameters(), strict=True)
print("bit-identical after resuming:", all(torch.equal(one, other) for one, other in pairs))
