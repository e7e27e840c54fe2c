"""Each architecture that transformers makes is read, computed and trained as transformers does, or refused by name."""

import json
import shutil
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from simbal import hf
from simbal.errors import UserError
from simbal.hf.convert import ARCHITECTURES, HEAD, LLAMA, MIXTRAL, OLMOE, QWEN3, QWEN3_MOE, Architecture, views
from simbal.hf.export import export
from simbal.model.head import head_loss
from simbal.training.build import build_module

V, S = 32, 16
EXACT = {"atol": 1e-5, "rtol": 1e-5}
ALL = [pytest.param(each, id=each.name) for each in ARCHITECTURES]
RUNS = {  # the keys of a run, and the architecture that it is written as
    ("model.num_kv_heads=1", "model.head_dim=4"): MIXTRAL,
    ("model.tie_embeddings=true",): MIXTRAL,
    ("model.num_kv_heads=1", "model.qk_norm=head", "model.head_dim=6", "router.renormalize=false"): QWEN3_MOE,
    ("model.qk_norm=head", "model.tie_embeddings=true"): QWEN3_MOE,
    ("model.num_kv_heads=1", "model.qk_norm=projection", "model.tie_embeddings=true"): OLMOE,
    ("model.qk_norm=projection", "router.renormalize=false"): OLMOE,
    ("model.num_experts=0", "model.num_kv_heads=1", "model.tie_embeddings=true", "model.head_dim=4"): LLAMA,
    ("model.num_experts=0", "model.num_kv_heads=1", "model.qk_norm=head", "model.head_dim=12"): QWEN3,
}
RUN_CASES = [pytest.param(keys, found, id=",".join(keys)) for keys, found in RUNS.items()]


def config_of(kind: Architecture, heads=4, kv_heads=2, head_dim=8, tied=False, **more):
    """A config of transformers; OLMoE's heads are as wide as they have to be."""
    width = heads * (16 if head_dim == 8 else 8) if kind.free_head_dim else heads * head_dim
    keys = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12} if kind.sparse else {}
    keys |= {"head_dim": head_dim} if kind.free_head_dim else {}
    if kind is MIXTRAL:
        keys["num_local_experts"] = keys.pop("num_experts")
    return AutoConfig.for_model(
        kind.model_type, vocab_size=V, hidden_size=width, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=S, tie_word_embeddings=tied,
        initializer_range=width**-0.5, bos_token_id=0, eos_token_id=0, pad_token_id=None, **keys | more,
    )  # fmt: skip


def made(config):
    """A model of transformers with random weights, its norms' gains among them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model.eval()


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, V, (3, S), generator=torch.Generator().manual_seed(seed))


def loaded(model, folder):
    model.save_pretrained(folder)
    return hf.from_pretrained(folder)


def logits(model) -> torch.Tensor:
    return model(tokens())[0] @ model.head_VD.T


@torch.no_grad()
@pytest.mark.parametrize("kind", ALL)
@given(
    kv_heads=st.sampled_from([1, 2, 4]), groups=st.sampled_from([1, 2, 3]), head_dim=st.sampled_from([8, 12, 16]),
    tied=st.booleans(), renormalize=st.booleans(), theta=st.sampled_from([1e2, 1e6]),
)  # fmt: skip
def test_logits_are_those_of_transformers_for_any_heads(kind, kv_heads, groups, head_dim, tied, renormalize, theta):
    more = {"norm_topk_prob": renormalize} if kind.free_renormalize else {}
    rope = {"rope_type": "default", "rope_theta": theta}
    config = config_of(kind, kv_heads * groups, kv_heads, head_dim, tied, rope_parameters=rope, **more)
    theirs = made(config)
    with TemporaryDirectory() as folder:
        ours = loaded(theirs, folder)
    torch.testing.assert_close(logits(ours), theirs(tokens()).logits, **EXACT)
    assert ours.shape.kv_heads == kv_heads
    assert (ours.head_VD is ours.embedding.weight) == tied


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ALL)
def test_training_follows_that_of_transformers(tmp_path, kind, tied):
    """Three steps with the same batches: then every weight has the gradient that it has there."""
    theirs = made(config_of(kind, tied=tied))
    ours = loaded(theirs, tmp_path)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (ours, theirs)]
    for step in range(4):
        inputs_BS, targets_N = tokens(step)[:, :-1], tokens(step)[:, 1:].flatten()
        loss = head_loss(ours(inputs_BS)[0].flatten(0, 1), ours.head_VD, targets_N, 0.0).loss
        other = F.cross_entropy(theirs(inputs_BS).logits.flatten(0, 1), targets_N)
        torch.testing.assert_close(loss, other, **EXACT)
        for optimizer, each in zip(optimizers, (loss, other), strict=True):
            optimizer.zero_grad()
            each.backward()
            if step < 3:
                optimizer.step()
    for model in (ours, theirs):  # the gradients take the weights' places, and so their names
        for parameter in model.parameters():
            parameter.data = parameter.grad
    wanted = views(loaded(theirs, tmp_path))
    for name, gradient in views(ours).items():
        assert gradient.abs().max() > 0 or ".experts." in name, name  # an expert may have had no token
        torch.testing.assert_close(gradient, wanted[name], **EXACT)


@torch.no_grad()
@pytest.mark.parametrize(("keys", "kind"), RUN_CASES)
def test_a_run_is_written_as_the_architecture_that_computes_it_and_read_back_to_the_bit(exported, keys, kind):
    run, folder = exported("balancing=none", "model.init_std=0.3", *keys)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs).__name__ == kind.class_name
    assert f"`{kind.class_name}`" in (folder / "README.md").read_text()
    torch.testing.assert_close(logits(run.model), theirs(tokens()).logits, **EXACT)
    back = hf.from_pretrained(folder, run.model.backend or "reference")
    assert torch.equal(logits(back), logits(run.model))
    module = build_module(run.spec, run.store, run.device, "32-true")
    module.model.load_state_dict(back.state_dict())
    assert torch.equal(logits(module.model), logits(run.model))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("model.qk_norm=projection", "model.num_experts=0"), "model.qk_norm=projection with model.num_experts=0"),
        (("model.qk_norm=projection", "model.head_dim=4"), "model.head_dim=4: heads of OLMoE are of width d_model"),
        (("model.num_experts=0", "model.num_heads=3", "model.head_dim=4"), "model.d_model=16: in Llama it is a"),
        (("model.num_kv_heads=1", "router.renormalize=false"), "router.renormalize=false: Mixtral divides"),
        (("model.qk_norm=head", "router=sigmoid"), "router.gating=sigmoid: Qwen3-MoE gates by a softmax"),
        (("model.qk_norm=head", "balancing=lf"), "balancing.lf steers the choice of experts: Qwen3-MoE takes"),
        (("model.num_shared_experts=1",), "model.num_shared_experts=1: every expert of"),
        (("model.qk_norm=projection", "model.bias=true", "experts=reference"), "model.bias=true: feed-forwards of"),
    ],
)
def test_a_run_that_no_architecture_computes_is_refused_by_its_key(run_of, tmp_path, keys, says):
    run = run_of("balancing=none", "trainer.max_steps=2", "trainer.val_every=2", *keys)
    with pytest.raises(UserError) as refused:
        export(str(run.path), str(tmp_path / "model"), overwrite=False)
    assert str(refused.value).startswith(f"{run.path} cannot be exported, for its {says}")
    assert not (tmp_path / "model").exists()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """`folder_of(QWEN3)`: what transformers writes, which no test may change."""
    folders = {}

    def written(kind):
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("written")
            made(config_of(kind)).save_pretrained(folders[kind])
        return folders[kind]

    return written


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        (OLMOE, {"attention_bias": True}, "attention_bias=True"),
        (OLMOE, {"head_dim": 6}, "head_dim=6"),
        (OLMOE, {"sliding_window": 4}, "sliding_window=4"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        (QWEN3_MOE, {"mlp_only_layers": [0]}, "mlp_only_layers=[0]"),
        (QWEN3_MOE, {"use_sliding_window": True, "sliding_window": 8}, "sliding_window=8"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=['sliding_attention']"),
        (LLAMA, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters.rope_type=yarn"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA, {"num_key_value_heads": 1}, "k_proj.weight has the shape (16, 64), and by its config.json (8, 64)"),
        (LLAMA, {"num_hidden_layers": 1}, "model.layers.1."),
        (MIXTRAL, {"num_hidden_layers": 3}, "lacks the weight model.layers.2."),
        (MIXTRAL, {"model_type": "qwen2_moe"}, "model_type=qwen2_moe is none of mixtral, llama, olmoe"),
    ],
)
def test_what_our_model_cannot_say_is_refused_by_its_key(folder_of, tmp_path, kind, change, says):
    shutil.copytree(folder_of(kind), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as refused:
        hf.from_pretrained(tmp_path)
    assert says in str(refused.value)


def test_damaged_and_missing_files_are_named(folder_of, tmp_path):
    shutil.copytree(folder_of(MIXTRAL), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="model.safetensors cannot be read"):
        hf.from_pretrained(tmp_path)
    file.unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="has neither model.safetensors nor .* save_pretrained"):
        hf.from_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="config.json cannot be read"):
        hf.from_pretrained(tmp_path)


def test_tied_embeddings_may_be_in_the_file_twice(tmp_path):
    model = made(config_of(LLAMA, tied=True))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    assert HEAD not in weights
    weights[HEAD] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file, {"format": "pt"})
    with torch.no_grad():
        torch.testing.assert_close(logits(hf.from_pretrained(tmp_path)), model(tokens()).logits, **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("shard", ["50GB", "4KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folders_in_half_precision_and_in_parts_are_read(tmp_path, dtype, shard):
    made(config_of(MIXTRAL)).to(dtype).save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "4KB")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits(hf.from_pretrained(tmp_path)), theirs(tokens()).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("overrides", [("balancing=simbal",), ("balancing=ortho_param",)], ids=",".join)
def test_a_round_trip_changes_no_bit(exported, overrides):
    run, folder = exported(*overrides)
    back, wanted = hf.from_pretrained(folder), views(run.model)
    assert views(back).keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in views(back).items())
    assert not back.training
