"""Write a random OLMoE with its own tokenizer to the folder `olmoe`, in the Hugging Face format.

Measure it like a downloaded model: `simbal evaluate hf=olmoe data=pysource analysis=quality`.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"

torch.manual_seed(0)
config = OlmoeConfig(
    vocab_size=512, hidden_size=64, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
    num_experts=16, num_experts_per_tok=4, max_position_embeddings=128, initializer_range=0.1,
)  # fmt: skip
OlmoeForCausalLM(config).save_pretrained("olmoe")

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
letters = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=[END], initial_alphabet=letters, show_progress=False)
tokenizer.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained("olmoe")
