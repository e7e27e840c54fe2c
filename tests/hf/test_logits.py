"""What transformers makes of an export computes what the run's own model computes."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MixtralForCausalLM

from simbal.analysis.generate import Sampler, continue_tokens

TOLERANCE = 1e-4
DENSE = ("balancing=none", "model.num_experts=0")
RUNS = [
    ("balancing=simbal", "model.init_std=0.2"), ("balancing=ortho_param",), ("balancing=ortho_mix",),
    ("balancing=sinkhorn",), DENSE, ("balancing=none", "model.num_experts=0", "model.top_k=0"),
    ("balancing=lbl", "model.rope_theta=300.0", "model.norm_eps=0.01", "model.init_std=0.2"),
]  # fmt: skip


def tokens_of(run, batch: int = 4) -> torch.Tensor:
    shape = (batch, run.spec.config.data.seq_len)
    return torch.randint(0, run.model.shape.vocab_size, shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def difference(run, folder) -> float:
    """The largest between our logits and those of transformers."""
    tokens_BS = tokens_of(run)
    hidden_BSD, _ = run.model(tokens_BS, run.module.balancing)
    ours_BSV, theirs_BSV = hidden_BSD @ run.model.head_VD.T, AutoModelForCausalLM.from_pretrained(folder)(tokens_BS)
    assert ours_BSV.std() > 0.1  # logits of a model that has learnt something
    return (ours_BSV - theirs_BSV.logits).abs().max().item()


@pytest.mark.parametrize("overrides", RUNS, ids=",".join)
def test_logits_are_those_of_transformers(exported, overrides):
    found = difference(*exported(*overrides))
    print(f"largest difference of logits, {','.join(overrides)}: {found:.2g}")
    assert found <= TOLERANCE


@pytest.mark.parametrize(("overrides", "kind"), [(RUNS[0], MixtralForCausalLM), (DENSE, LlamaForCausalLM)])
def test_transformers_finds_every_weight_and_no_other(exported, overrides, kind):
    _, folder = exported(*overrides)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model) is kind
    assert model.dtype == torch.float32
    assert not any(loading.values()), loading


@torch.no_grad()
@pytest.mark.parametrize("overrides", [RUNS[0], DENSE], ids=",".join)
def test_greedy_generation_is_that_of_transformers(exported, overrides):
    run, folder = exported(*overrides)
    model, prompt_BS, new = AutoModelForCausalLM.from_pretrained(folder), tokens_of(run)[:, :4], 12
    possible_V = torch.ones(run.model.shape.vocab_size, dtype=torch.bool)
    ours_BT, _ = continue_tokens(run.decoder(), prompt_BS, new, Sampler(0.0, 1.0, 0), possible_V)
    mask_BS = torch.ones_like(prompt_BS)
    theirs_BS = model.generate(
        prompt_BS, attention_mask=mask_BS, max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    assert torch.equal(ours_BT, theirs_BS[:, 4:])
    assert len(ours_BT.unique()) > 4


def test_end_of_text_ends_a_generation_and_the_context_is_that_of_training(exported):
    run, folder = exported(*RUNS[0])
    model = AutoModelForCausalLM.from_pretrained(folder)
    last = run.model.shape.vocab_size - 1
    assert (model.generation_config.eos_token_id, model.generation_config.bos_token_id) == (last, last)
    assert model.config.max_position_embeddings == run.spec.config.data.seq_len
