"""The schema and conf/ have the same keys, and what a key says of itself is enforced."""

import math
import re
from types import NoneType
from typing import Literal, get_args, get_origin

import pytest
import yaml

from simbal.config.compose import checked, typed
from simbal.config.schema import DATA, GROUPS, Config, every_key, integer_keys, models_of
from simbal.errors import ConfigError
from tests.config.any_form import value_at, with_key, without
from tests.conftest import CONF
from tests.run_folders import changed

KEYS = {name: field.annotation for name, field in every_key().items() if name != "balancing"}
SIGNS = ("ge", "gt", "le")
BOUNDS = {
    name: {sign: getattr(bound, sign) for bound in field.metadata for sign in SIGNS if hasattr(bound, sign)}
    for name, field in every_key().items()
}
BOUNDED = [name for name, bounds in BOUNDS.items() if bounds and name != "balancing"]
OF_OTHER_KINDS = {
    bool: [0, 1.0, "true", [], {}], int: [True, 1.0, "1", [], {}], float: [True, "1", [], {}],
    str: [1, 1.5, True, [], {}], list: [1, "a", {}, [{}]], dict: [1, "a", []],
}  # fmt: skip


def keys_in(path):
    return yaml.safe_load(path.read_text()).keys() - {"defaults", "hydra"}


@pytest.mark.parametrize("group", [group for group in GROUPS if group != "balancing"])
def test_a_group_and_its_files_have_the_same_keys(group):
    models = models_of(Config.model_fields[group].annotation)
    files = [keys_in(path) for path in (CONF / group).glob("*.yaml")]
    assert all(any(keys <= model.model_fields.keys() for model in models) for keys in files)
    assert all(any(keys == model.model_fields.keys() for keys in files) for model in models)


def test_keys_of_no_group_are_in_the_main_file():
    assert keys_in(CONF / "config.yaml") == Config.model_fields.keys() - {*GROUPS}


def test_every_source_of_data_has_a_file_by_its_name():
    assert {path.stem for path in (CONF / "data").glob("*.yaml")} == {*DATA}


@pytest.mark.parametrize("name", BOUNDED)
def test_every_bound_is_enforced_and_no_tighter(base_spec, name):
    bounds, plain = BOUNDS[name], with_key(base_spec.written, name)
    step = 1e-9 if every_key()[name].annotation is float else 1
    inside = [bounds[sign] for sign in ("ge", "le") if sign in bounds] + ([step] if bounds.get("gt") == 0 else [])
    outside = [bounds[sign] - step for sign in ("ge", "gt") if sign in bounds]
    outside += [bounds["le"] + step] if "le" in bounds else []
    outside += [math.inf, math.nan] if step < 1 else []
    for value in inside:
        try:
            typed(Config, changed(plain, {name: value}))
        except ConfigError as error:  # a rule about several keys, whose sentence does not begin with a bound
            assert "at least" not in str(error).partition(":")[0] or name not in str(error)  # noqa: PT017
    for value in outside:
        with pytest.raises(ConfigError, match=rf"^{name}="):
            typed(Config, changed(plain, {name: value}))


def other_kinds(kind):
    """Values that are of any kind but this."""
    if get_origin(kind) is Literal:
        return [*OF_OTHER_KINDS[str], None, "no such choice"]
    kinds = [one for one in get_args(kind) if one is not NoneType] if NoneType in get_args(kind) else [kind]
    plain = getattr(kinds[0], "__origin__", kinds[0])
    return [*OF_OTHER_KINDS[get_origin(plain) or plain], *([None] if kinds == [kind] else [])]


@pytest.mark.parametrize("name", [name for name in KEYS if name not in ("data.files", "data.validation_files")])
def test_a_value_of_another_kind_is_named(base_spec, name):
    plain = with_key(base_spec.written, name)
    is_group = isinstance(value_at(plain, name), dict) and name in GROUPS
    for value in [1, "a", None, [], True] if is_group else other_kinds(KEYS[name]):
        with pytest.raises(ConfigError, match=f"^{re.escape(name)}"):
            checked(changed(plain, {name: value}))


@pytest.mark.parametrize("name", KEYS)
def test_a_key_that_is_missing_is_named(base_spec, name):
    with pytest.raises(ConfigError, match=f"^{re.escape(name)}(.kind|.source)? is missing"):
        checked(without(with_key(base_spec.written, name), name))


@pytest.mark.parametrize("group", ["", *(f"{group}." for group in GROUPS if group != "balancing")])
def test_a_key_that_is_unknown_is_named(base_spec, group):
    with pytest.raises(ConfigError, match=f"^there is no key {group}nonsense"):
        checked(changed(base_spec.written, {f"{group}nonsense": 1}))


@pytest.mark.parametrize(
    ("key", "value", "names"),
    [
        ("model.top_k", 5, ["model.top_k=5", "model.num_experts=4"]),
        ("model.num_heads", 3, ["model.d_model=16", "model.num_heads=3"]),
        ("model.num_kv_heads", 3, ["model.num_kv_heads=3", "model.num_heads=2", "null"]),
        ("model.head_dim", 7, ["model.head_dim=7", "even"]),
        ("model.qk_norm", "layer", ["model.qk_norm=layer", "none, head, projection"]),
        ("model.num_experts", 0, ["model.num_experts=0", "balancing=none"]),
        ("trainer.micro_batch", 3, ["trainer.global_batch=8", "trainer.micro_batch=3", "1, 2, 4, 8"]),
        ("balancing.simbal.coef", -0.1, ["balancing.simbal.coef=-0.1", "0"]),
        ("balancing.simbal.schedule", [[0, 1], [13, 0]], ["balancing.simbal.schedule", "trainer.max_steps=12"]),
        ("optim.betas", [0.9, 1.0], ["optim.betas[1]=1.0", "less than 1"]),
        ("optim.betas", [0.9], ["optim.betas", "2"]),
        ("data.source", "web", ["data.source=web", "pysource, files, dclm, synthetic"]),
        ("data.validation_tokens", 3, ["data.validation_tokens=3", "data.seq_len=16"]),
        ("data.vocab_size", "???", ["data.vocab_size", "data.vocab_size=VALUE"]),
        ("data.cache_dir", "", ["data.cache_dir"]),
        ("output_dir", "", ["output_dir"]),
    ],
)
def test_values_that_do_not_go_together_are_named_with_the_remedy(small_spec, key, value, names):
    with pytest.raises(ConfigError) as refusal:
        checked(changed(small_spec().written, {key: value}))
    assert all(name in str(refusal.value) for name in names), refusal.value


def test_more_orthogonal_experts_than_dimensions_are_refused(small_spec):
    plain = changed(small_spec().written, {"model.num_experts": 17, "router.init": "orthogonal"})
    with pytest.raises(ConfigError, match="model.num_experts=17 .*model.d_model=16"):
        checked(plain)


def test_text_needs_a_vocabulary_that_the_token_table_can_be_cut_to(small_spec):
    plain = small_spec("data=pysource", "data.vocab_size=257").written
    with pytest.raises(ConfigError, match="data.vocab_size=100258 .*100257.*100277"):
        checked(changed(plain, {"data.vocab_size": 100_258}))


def test_integer_keys_are_those_that_take_spans():
    keys = integer_keys()
    assert {"seed", "trainer.max_steps", "model.top_k", "data.vocab_size", "data.branching"} <= keys
    assert not keys & {"optim.lr", "name", "data.strict", "trainer.progress_bar"}
