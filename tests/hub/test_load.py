"""hub.load gives back the bits that were written, reads what transformers writes, and refuses the rest by name."""

import json
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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
REUSED = settings(suppress_health_check=[*settings().suppress_health_check, HealthCheck.function_scoped_fixture])


@pytest.fixture
def copy(exported, tmp_path):
    """`copy(*SPARSE, key=value)`: an export of its own, whose config.json has other values; None removes a key.

    It is without the simbal.json that would say so.
    """

    def copied(*overrides: str, **changes):
        folder = tmp_path / "copy"
        shutil.copytree(exported(*overrides)[1], folder, dirs_exist_ok=True)
        (folder / "simbal.json").unlink()
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


def test_without_head_dim_the_width_has_to_be_a_multiple_of_twice_the_heads(copy):
    with pytest.raises(UserError, match="hidden_size=15 is no multiple of twice num_attention_heads=2"):
        hub.load(copy(*SPARSE, hidden_size=15, head_dim=None))


def test_a_config_of_transformers_4_is_read_alike(copy):
    folder = copy(*SPARSE, rope_theta=123.0)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))
    assert hub.load(folder).shape.rope_theta == 123.0


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


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"a": "../../secret.safetensors"}, "which is no safetensors file of its folder"),
        ({"a": "pytorch_model.bin"}, "names 'pytorch_model.bin', which is no safetensors file"),
        ({"a": 3}, "names 3, which is no"),
        ({}, "its weight_map is missing"),
        ("x", "its weight_map is missing"),
        ({"a": "gone.safetensors"}, "gone.safetensors cannot be read"),
        ({"a": "one.safetensors"}, "one.safetensors does not hold the weights that model.safetensors.index.json says"),
    ],
)
def test_an_index_leads_nowhere_but_to_the_weights_of_its_folder(copy, index, says):
    folder = copy(*SPARSE)
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(UserError, match=says):
        hub.load(folder)


def loads_or_refuses(folder) -> None:
    sentence = ""
    try:
        hub.load(folder)
    except UserError as refused:
        sentence = str(refused)
    assert "\n" not in sentence


@REUSED
@given(
    key=st.sampled_from([*SIZES, "rope_theta", "rope_parameters", "head_dim", "sliding_window", "architectures",
                         "model_type", "rms_norm_eps", "num_local_experts", "num_experts_per_tok", "hidden_act"]),
    value=st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.lists(st.integers(), max_size=2) | st.dictionaries(st.sampled_from(["rope_theta", "type"]), st.integers()),
)  # fmt: skip
def test_no_config_is_a_traceback(copy, key, value):
    loads_or_refuses(copy(*SPARSE, **{key: value}))


@REUSED
@given(place=st.integers(0, 3000), byte=st.integers(0, 255))
def test_no_byte_of_a_header_is_a_traceback(copy, place, byte):
    folder = copy(*SPARSE)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[place] = byte
    (folder / "model.safetensors").write_bytes(content)
    loads_or_refuses(folder)


def damaged(exported, folder, name, place):
    """A copy of an export with a flipped bit."""
    shutil.copytree(exported(*SPARSE)[1], folder, dirs_exist_ok=True)
    content = bytearray((folder / name).read_bytes())
    content[place % len(content)] ^= 1
    (folder / name).write_bytes(content)


@REUSED
@given(place=st.integers(0, 2**20))
def test_a_flipped_bit_of_the_weights_is_found_wherever_it_is(exported, tmp_path, place):
    damaged(exported, tmp_path / "copy", "model.safetensors", place)
    with pytest.raises(UserError, match="model.safetensors is damaged: it is not what the export has written, by simb"):
        hub.load(tmp_path / "copy")


def test_so_is_a_changed_config_and_a_simbal_json_without_checksums(exported, tmp_path):
    folder = tmp_path / "copy"
    damaged(exported, folder, "model.safetensors", 0)
    shutil.copy(exported(*SPARSE)[1] / "model.safetensors", folder)
    assert hub.load(folder).shape.num_experts == 4
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"rope_theta": 10000.0', '"rope_theta": 10001.0'))
    with pytest.raises(UserError, match="config.json is damaged: it is not what the export has written"):
        hub.load(folder)
    facts = json.loads((folder / "simbal.json").read_text())
    del facts["sha256"]
    (folder / "simbal.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="simbal.json has no checksums: export the run again"):
        hub.load(folder)
