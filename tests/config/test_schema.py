"""The schema and conf/ have the same keys, and the types and bounds in the schema are enforced."""

import math
import re
from types import NoneType
from typing import Literal, get_args, get_origin

import pytest

from simbal.config.compose import checked, typed
from simbal.config.options import options, read
from simbal.config.schema import DATA, GROUPS, Config, every_key, integer_keys, models_of
from simbal.errors import ConfigError
from tests.config.any_form import with_key, without
from tests.conftest import CONF
from tests.run_folders import changed

SCHEMA_GROUPS = [group for group in GROUPS if group != "balancing"]
KEYS = {name: field.annotation for name, field in every_key().items() if name != "balancing"}
SIGNS = ("ge", "gt", "le")
BOUNDS = {
    name: bounds
    for name in KEYS
    if (bounds := {s: getattr(b, s) for b in every_key()[name].metadata for s in SIGNS if hasattr(b, s)})
}
WRONG_VALUES = {
    bool: [0, "true"], int: [True, 1.0, "1"], float: [True, "1"], str: [1, True], list: [1, "a", [{}]], dict: [1, []],
}  # fmt: skip


def keys_in(path):
    return read(path).keys() - {"defaults", "hydra"}


@pytest.mark.parametrize("group", SCHEMA_GROUPS)
def test_group_and_its_files_have_the_same_keys(group):
    models = models_of(Config.model_fields[group].annotation)
    files = [keys_in(path) for path in options(group).values()]
    assert all(any(keys <= model.model_fields.keys() for model in models) for keys in files)
    assert all(any(keys == model.model_fields.keys() for keys in files) for model in models)


def test_root_config_has_the_keys_outside_of_groups_and_every_data_source_has_a_file():
    assert keys_in(CONF / "config.yaml") == Config.model_fields.keys() - {*GROUPS}
    assert options("data").keys() == DATA.keys()


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_are_enforced_exactly(base_spec, name):
    bounds, plain = BOUNDS[name], with_key(base_spec.written, name)
    step = 1e-9 if every_key()[name].annotation is float else 1
    inside = [bounds[sign] for sign in ("ge", "le") if sign in bounds] + ([step] if bounds.get("gt") == 0 else [])
    outside = [bounds[sign] - step for sign in ("ge", "gt") if sign in bounds]
    outside += [bounds["le"] + step] if "le" in bounds else []
    outside += [math.inf, math.nan] if step < 1 else []
    for value in inside:
        try:
            typed(Config, changed(plain, {name: value}))
        except ConfigError as error:  # a rule about several keys
            assert not re.match(rf"{name}=\S+ must be (greater|less)", str(error))  # noqa: PT017
    for value in outside:
        with pytest.raises(ConfigError, match=rf"^{name}="):
            typed(Config, changed(plain, {name: value}))


def wrong_values(kind):
    if get_origin(kind) is Literal:
        return [1, None, "no such choice"]
    kinds = [one for one in get_args(kind) if one is not NoneType] if NoneType in get_args(kind) else [kind]
    plain = getattr(kinds[0], "__origin__", kinds[0])
    return WRONG_VALUES[get_origin(plain) or plain] + ([None] if kinds == [kind] else [])


@pytest.mark.parametrize("name", [name for name in KEYS if name not in ("data.files", "data.validation_files")])
def test_value_of_another_type_is_refused_by_its_key(base_spec, name):
    plain = with_key(base_spec.written, name)
    for value in [1, None, []] if name in GROUPS else wrong_values(KEYS[name]):
        with pytest.raises(ConfigError, match=f"^{re.escape(name)}"):
            checked(changed(plain, {name: value}))


@pytest.mark.parametrize("name", KEYS)
def test_missing_key_is_named(base_spec, name):
    with pytest.raises(ConfigError, match=f"^{re.escape(name)}(.kind|.source)? is missing"):
        checked(without(with_key(base_spec.written, name), name))


@pytest.mark.parametrize("group", ["", *(f"{group}." for group in SCHEMA_GROUPS)])
def test_unknown_key_is_named(base_spec, group):
    with pytest.raises(ConfigError, match=f"^there is no key {group}nonsense"):
        checked(changed(base_spec.written, {f"{group}nonsense": 1}))


@pytest.mark.parametrize(
    ("keys", "names"),
    [
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
        ({"data.source": "web"}, ["data.source=web", "pysource, files, dclm, synthetic"]),
        ({"data.validation_tokens": 3}, ["data.validation_tokens=3", "data.seq_len=16"]),
        ({"data.vocab_size": "???"}, ["data.vocab_size", "data.vocab_size=VALUE"]),
        ({"data.cache_dir": ""}, ["data.cache_dir"]),
        ({"output_dir": ""}, ["output_dir"]),
    ],
)
def test_values_that_contradict_each_other_are_named(small_spec, keys, names):
    with pytest.raises(ConfigError) as refusal:
        checked(changed(small_spec().written, keys))
    assert all(name in str(refusal.value) for name in names), refusal.value


def test_text_needs_a_vocabulary_of_cl100k_base(small_spec):
    plain = small_spec("data=pysource", "data.vocab_size=257").written
    with pytest.raises(ConfigError, match="data.vocab_size=100258 .*100257.*100277"):
        checked(changed(plain, {"data.vocab_size": 100_258}))


def test_integer_keys_accept_spans():
    assert {"seed", "trainer.max_steps", "model.top_k", "data.vocab_size", "data.branching"} <= integer_keys()
    assert not integer_keys() & {"optim.lr", "name", "data.strict", "trainer.progress_bar"}


def test_hash_of_the_default_config_has_not_moved(base_spec):
    assert base_spec.hash[:16] == "ad5f233a7609934b"
