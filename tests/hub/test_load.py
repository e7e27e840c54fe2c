"""hub.load gives back the bits that were written, reads what transformers writes, and refuses the rest by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from simbal import hub
from simbal.errors import UserError
from simbal.hub.weights import count, views
from simbal.training.build import build_module

SPARSE, DENSE = ("balancing=simbal", "model.init_std=0.2"), ("balancing=none", "model.num_experts=0")
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture
def copy(exported, tmp_path):
    """`copy(*SPARSE, key=value)`: an export of its own, whose config.json has other values; None removes a key."""

    def copied(*overrides: str, **changes):
        folder = tmp_path / "copy"
        shutil.copytree(exported(*overrides)[1], folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return copied


@torch.no_grad()
def theirs(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the logits of a model of transformers."""
    tokens_BS = torch.randint(0, 32, (3, 16), generator=torch.Generator().manual_seed(0))
    return tokens_BS, model(tokens_BS).logits


@pytest.mark.parametrize("overrides", [SPARSE, DENSE, ("balancing=ortho_param",)], ids=",".join)
def test_a_round_trip_changes_no_bit(exported, overrides):
    run, folder = exported(*overrides)
    back, wanted = hub.load(folder), views(run.model)
    assert views(back).keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in views(back).items())
    assert len(wanted) == count(back.shape)
    assert not back.training


@torch.no_grad()
def test_what_was_loaded_goes_into_a_lightning_module_and_computes_the_same_bits(exported):
    run, folder = exported(*SPARSE)
    module = build_module(run.spec, run.store, run.device, "32-true").eval()
    module.model.load_state_dict(hub.load(folder).state_dict())
    tokens_BS = torch.arange(32).view(2, 16)
    ours, back = (model(tokens_BS, run.module.balancing)[0] for model in (run.model, module.model))
    assert torch.equal(ours, back)


@torch.no_grad()
@pytest.mark.parametrize("shard", ["50GB", "4KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mixtral", "llama"])
def test_what_transformers_writes_is_read(tmp_path, kind, dtype, shard):
    torch.manual_seed(0)
    if kind == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, initializer_range=0.3))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3))
    model.to(dtype).save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "4KB")
    tokens_BS, logits_BSV = theirs(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    ours = hub.load(tmp_path)
    torch.testing.assert_close(ours(tokens_BS)[0] @ ours.head_VD.T, logits_BSV, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("num_key_value_heads", 1, "k_proj.weight has the shape (16, 16), and by its config.json (8, 16)"),
        ("num_key_value_heads", None, None),
        ("sliding_window", 8, "sliding_window=8 is shorter than max_position_embeddings=16"),
        ("sliding_window", 16, None),
        ("tie_word_embeddings", True, "tie_word_embeddings=true, and its lm_head.weight is not its embedding"),
        ("hidden_act", "gelu", "hidden_act=gelu is not supported, only silu"),
        ("attention_bias", True, "attention_bias=True is not supported"),
        ("head_dim", 4, "q_proj.weight has the shape (16, 16), and by its config.json (8, 16)"),
        ("attention_dropout", 0.1, "attention_dropout=0.1 is not supported"),
        ("router_jitter_noise", 0.1, "router_jitter_noise=0.1 is not supported"),
        ("quantization_config", {"bits": 4}, "quantization_config={'bits': 4} is not supported"),
        ("auto_map", {"AutoModel": "x.Y"}, "auto_map={'AutoModel': 'x.Y'} is not supported"),
        ("rope_scaling", {"type": "linear"}, "rope_scaling={'type': 'linear'} is not supported"),
        ("rope_parameters", {"rope_type": "yarn"}, "rope_parameters.rope_type=yarn is not supported, only default"),
        ("rope_parameters", {"partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor=0.5 is not"),
        ("rope_parameters", 5, "rope_parameters=5 must hold keys with values"),
        ("rope_parameters", {"rope_theta": 0}, "rope_theta=0 must be above 0"),
        ("architectures", ["Qwen3MoeForCausalLM"], "with model_type=mixtral is none of MixtralForCausalLM, Llama"),
        ("model_type", "llama", "is none of"),
        ("num_experts_per_tok", 5, "num_experts_per_tok=5 is more than num_local_experts=4"),
        ("num_local_experts", 0, "num_local_experts=0 must be a whole number of at least 1"),
        ("hidden_size", 15, "has the shape (64, 16), and by its config.json (64, 15)"),
        ("hidden_size", "16", "hidden_size=16 must be a whole number"),
        ("intermediate_size", 2**20, "has the shape (8, 16), and by its config.json (1048576, 16)"),
        ("num_hidden_layers", 1, "has weights that our model has not: 'model.layers.1."),
    ],
)  # fmt: skip
def test_what_our_model_is_not_is_refused_by_name_and_value(copy, key, value, says):
    folder = copy(*SPARSE, **{key: value})
    if says is None:
        assert hub.load(folder).shape.num_experts == 4
        return
    with pytest.raises(UserError) as refused:
        hub.load(folder)
    assert says in str(refused.value)
    assert str(refused.value).count("\n") == 0


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda weights: weights.pop("lm_head.weight"), "lacks the weights lm_head.weight"),
        (lambda weights: weights.update({"model.norm.bias": torch.zeros(16)}), "has not: 'model.norm.bias'"),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(8)}), "model.norm.weight has the shape (8,)"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.zeros(16).long()}),
            "'model.norm.weight' is of kind I64, not one of F32, BF16, F16",
        ),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused_by_name(copy, damage, says):
    folder = copy(*SPARSE)
    weights = load_file(folder / "model.safetensors")
    damage(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError) as refused:
        hub.load(folder)
    assert says in str(refused.value)


def test_damaged_and_missing_files_are_one_sentence(copy, tmp_path):
    folder = copy(*SPARSE)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content in (b"", whole[:7], whole[:-1], whole + b"x", b"\xff" * 8 + whole[8:], b"no weights at all"):
        file.write_bytes(content)
        with pytest.raises(UserError, match="model.safetensors is damaged"):
            hub.load(folder)
    file.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="has neither model.safetensors nor .*: weights in other formats are not read"):
        hub.load(folder)
    for content in ("", "[]", "{" * 10_000, "[" * 10_000, '{"a": NaN}', "\xff"):
        (folder / "config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(UserError, match="config.json is damaged"):
            hub.load(folder)
    with pytest.raises(UserError, match="nowhere/config.json cannot be read: No such file"):
        hub.load(tmp_path / "nowhere")
