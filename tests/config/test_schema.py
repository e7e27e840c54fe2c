"""The schema and conf/ have the same keys, and the types and bounds in the schema are enforced."""

import pytest

from simbal.config.compose import validate_config
from simbal.config.options import options, read
from simbal.config.schema import DATA, GROUPS, Config, every_key, integer_keys, models_of
from simbal.errors import ConfigError
from tests.config.any_form import with_key, without
from tests.conftest import CONF
from tests.run_folders import changed


def keys_in(path):
    return read(path).keys() - {"defaults", "hydra"}


def test_groups_and_their_files_have_the_same_keys():
    assert keys_in(CONF / "config.yaml") == Config.model_fields.keys() - {*GROUPS}
    assert options("data").keys() == DATA.keys()
    for group in {*GROUPS} - {"balancing"}:
        models = models_of(Config.model_fields[group].annotation)
        files = [keys_in(path) for path in options(group).values() if path.stem != "debug"]  # sets several groups
        assert all(any(keys <= model.model_fields.keys() for model in models) for keys in files)
        assert all(any(keys == model.model_fields.keys() for keys in files) for model in models)


def test_missing_or_unknown_key_is_named(base_spec):
    for name in every_key().keys() - {"balancing"}:
        with pytest.raises(ConfigError, match=f"^{name}(.kind|.source)? is missing"):
            validate_config(without(with_key(base_spec.written, name), name))
    for prefix in ("", "model.", "data.", "logger."):
        with pytest.raises(ConfigError, match=f"^there is no key {prefix}nonsense"):
            validate_config(changed(base_spec.written, {f"{prefix}nonsense": 1}))


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"seed": True}, ["seed=true", "integer"]),
        ({"optim.lr": "1"}, ["optim.lr=1", "number"]),
        ({"optim.lr": float("nan")}, ["optim.lr=nan", "finite"]),
        ({"columns": "ppl"}, ["columns=ppl", "list"]),
        ({"seed": 2**53 + 1}, ["seed=9007199254740993", str(2**53)]),
        ({"model": 1}, ["model=1"]),
        ({"logger": {}}, ["logger.kind is missing"]),
        ({"model.top_k": 5}, ["model.top_k=5", "model.num_experts=4"]),
        ({"model.num_heads": 3}, ["model.d_model=16", "model.num_heads=3"]),
        ({"model.num_kv_heads": 3}, ["model.num_kv_heads=3", "model.num_heads=2", "null"]),
        ({"model.head_dim": 7}, ["model.head_dim=7", "even"]),
        ({"model.qk_norm": "layer"}, ["model.qk_norm=layer", "none, head, projection"]),
        ({"model.num_experts": 0}, ["model.num_experts=0", "balancing=none"]),
        ({"model.num_experts": 17, "router.init": "orthogonal"}, ["model.num_experts=17", "model.d_model=16"]),
        ({"trainer.micro_batch": 3}, ["trainer.global_batch=8", "trainer.micro_batch=3", "1, 2, 4, 8"]),
        ({"balancing.simbal.coef": -0.1}, ["balancing.simbal.coef=-0.1", "0"]),
        ({"balancing.simbal.schedule": [[0, 1], [13, 0]]}, ["balancing.simbal.schedule", "trainer.max_steps=12"]),
        ({"optim.betas": [0.9, 1.0]}, ["optim.betas[1]=1.0", "less than 1"]),
        ({"optim.betas": [0.9]}, ["optim.betas", "2"]),
        ({"optim.mup": True, "model.tie_embeddings": True}, ["optim.mup=true", "model.tie_embeddings=false"]),
        (
            {"optim.algorithm": "muon", "trainer.strategy": "fsdp", "trainer.devices": 2, "trainer.micro_batch": 4},
            ["optim.algorithm=muon", "trainer=ddp"],
        ),
        ({"data.source": "web"}, ["data.source=web", "pysource, files, dclm, synthetic"]),
        ({"data.validation_tokens": 3}, ["data.validation_tokens=3", "data.seq_len=16"]),
        ({"data.vocab_size": "???"}, ["data.vocab_size", "data.vocab_size=VALUE"]),
        ({"data.cache_dir": ""}, ["data.cache_dir"]),
        ({"output_dir": ""}, ["output_dir"]),
    ],
)
def test_wrong_and_contradicting_values_are_named(small_spec, keys, names):
    with pytest.raises(ConfigError) as refusal:
        validate_config(changed(small_spec().written, keys))
    assert all(name in str(refusal.value) for name in names), refusal.value


def test_text_needs_a_vocabulary_of_cl100k_base(small_spec):
    plain = small_spec("data=pysource", "data.vocab_size=257").written
    with pytest.raises(ConfigError, match="data.vocab_size=100258 .*100257.*100277"):
        validate_config(changed(plain, {"data.vocab_size": 100_258}))


def test_integer_keys_accept_spans():
    assert {"seed", "trainer.max_steps", "model.top_k", "data.vocab_size", "data.branching"} <= integer_keys()
    assert not integer_keys() & {"optim.lr", "name", "data.strict", "trainer.progress_bar"}


def test_hash_of_the_default_config_has_not_moved(base_spec):
    assert base_spec.hash[:16] == "ee7fb5de41a053a2"
