"""A config is taken as it is, value for value, or refused with a sentence that names the key."""

import json
import re
from dataclasses import make_dataclass
from types import NoneType
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from simbal.config.check import checked, divisors
from simbal.config.schema import DATA, GROUPS, LOGGERS, Config, as_dict, every_key, fields_of
from simbal.config.values import flatten
from simbal.errors import UserError
from tests.config.any_form import value_at, with_key, without
from tests.run_folders import changed

KINDS = {name: kind for name, kind, _ in every_key() if name.partition(".")[0] != "balancing"}
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**19), st.floats(), st.text(max_size=4),
    st.sampled_from(["???", "1e-3", "tiny", "csv", "files", "auto"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
OF_OTHER_KINDS = {
    bool: [0, 1.0, "true", [], {}], int: [True, 1.0, "1", [], {}], float: [True, "1", [], {}],
    str: [1, 1.5, True, [], {}], list: [1, "a", {}, [{}]], dict: [1, "a", []],
}  # fmt: skip


def accepted(plain):
    try:
        return checked(plain)
    except UserError:
        return None


def structure(schema, forms):
    """The same as OmegaConf knows it, which has no choices and no bounds."""
    kinds = {
        name: structure(forms.get(name, kind), {}) if is_group else str if get_origin(kind) is Literal else kind
        for name, (kind, _, is_group) in fields_of(schema).items()
    }
    return make_dataclass(schema.__name__, kinds.items())


def other_kinds(kind):
    """Values that are of any kind but this."""
    if get_origin(kind) is Literal:
        return [*OF_OTHER_KINDS[str], None, "no such choice"]
    kinds = [one for one in get_args(kind) if one is not NoneType] if NoneType in get_args(kind) else [kind]
    return [*OF_OTHER_KINDS[get_origin(kinds[0]) or kinds[0]], *([None] if kinds == [kind] else [])]


@given(data=st.data())
def test_what_is_accepted_is_kept_value_for_value_and_omegaconf_would_take_it_too(base_spec, data):
    keys = [*flatten(base_spec.written), "columns", "data"]
    drawn = data.draw(st.dictionaries(st.sampled_from(keys), VALUES, min_size=1, max_size=2))
    plain = changed(base_spec.written, dict(sorted(drawn.items())) if "data" not in drawn else {"data": drawn["data"]})
    config = accepted(plain)
    if config is None:
        return
    assert json.dumps(as_dict(config), sort_keys=True) == json.dumps(plain, sort_keys=True)
    if "${" not in repr(plain):
        forms = {"data": DATA[plain["data"]["source"]], "logger": LOGGERS[plain["logger"]["kind"]]}
        merged = OmegaConf.merge(OmegaConf.structured(structure(Config, forms)), plain)
        assert OmegaConf.to_container(merged) == plain


def test_a_whole_number_stays_one_where_a_fraction_would_do(base_spec):
    config = checked(changed(base_spec.written, {"optim.lr": 1, "trainer.ckpt_seconds": 5}))
    assert (type(config.optim.lr), type(config.trainer.ckpt_seconds)) == (int, int)


@pytest.mark.parametrize("name", KINDS)
def test_a_key_that_is_missing_is_named(base_spec, name):
    with pytest.raises(UserError, match=f"^{re.escape(name)}(.kind|.source)?(=None)? is (missing|not one of)"):
        checked(without(with_key(base_spec.written, name), name))


@pytest.mark.parametrize("group", ["", *(f"{group}." for group in GROUPS if group != "balancing")])
def test_a_key_that_is_unknown_is_named(base_spec, group):
    with pytest.raises(UserError, match=f"^there is no key {group}nonsense"):
        checked(changed(base_spec.written, {f"{group}nonsense": 1}))


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("data.files", "data.validation_files")])
def test_a_value_of_another_kind_is_named(base_spec, name):
    plain = with_key(base_spec.written, name)
    is_group = isinstance(value_at(plain, name), dict) and name in GROUPS
    for value in [1, "a", None, [], True] if is_group else other_kinds(KINDS[name]):
        with pytest.raises(UserError, match=f"^{re.escape(name)}="):
            checked(changed(plain, {name: value}))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("model.top_k", 5, "model.top_k=5 must lie between 1 and model.num_experts=4"),
        ("model.num_heads", 3, "model.d_model=16 must be a multiple of twice model.num_heads=3"),
        ("model.num_kv_heads", 3, "model.num_kv_heads=3 must divide model.num_heads=2, or be null"),
        ("model.head_dim", 7, "model.head_dim=7 must be even: rotary embeddings turn pairs"),
        ("model.qk_norm", "layer", "model.qk_norm=layer is not one of none, head, projection"),
        ("model.d_model", "wide", "model.d_model=wide must be a whole number"),
        ("router.gating", "tanh", "router.gating=tanh is not one of softmax, sigmoid"),
        ("trainer.micro_batch", 3, "trainer.global_batch=8 must be a multiple of trainer.micro_batch=3"),
        ("trainer.max_steps", 0, "trainer.max_steps=0 must be at least 1"),
        ("balancing.simbal.coef", -0.1, "balancing.simbal.coef=-0.1 must be a finite number of at least 0"),
        ("balancing.simbal.coef", float("nan"), "balancing.simbal.coef=nan must be a finite number of at least 0"),
        ("balancing.simbal.schedule", [[0, 1], [13, 0]], "ends at step 13, after the run \\(trainer.max_steps=12\\)"),
        ("optim.lr", float("nan"), "optim.lr=nan must be a finite number of at least 0"),
        ("optim.betas", [0.9, 1.0], "optim.betas=.* must be two numbers of at least 0 and below 1"),
        ("model.num_experts", 0, "nothing to balance in a dense model"),
        ("data.source", "web", "data.source=web is not one of pysource, files, dclm, synthetic"),
        ("data.validation_tokens", 3, "data.validation_tokens=3 must be null or at least data.seq_len=16"),
        ("data.vocab_size", "???", "data.vocab_size has no value"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_what_is_allowed(small_spec, key, value, says):
    with pytest.raises(UserError, match=says):
        checked(changed(small_spec().written, {key: value}))


def test_more_orthogonal_experts_than_dimensions_are_refused(small_spec):
    plain = changed(small_spec().written, {"model.num_experts": 17, "router.init": "orthogonal"})
    with pytest.raises(UserError, match="17 rows cannot be orthogonal in model.d_model=16"):
        checked(plain)


def test_a_real_corpus_needs_a_vocabulary_that_the_token_table_can_be_cut_to(small_spec):
    plain = small_spec("data=pysource", "data.vocab_size=257").written
    with pytest.raises(UserError, match="data.vocab_size=100258 must lie between 257 and 100257, or be 100277"):
        checked(changed(plain, {"data.vocab_size": 100_258}))


@given(st.integers(1, 5000))
def test_divisors_are_all_that_divide_a_number_in_order(number):
    assert divisors(number) == [size for size in range(1, number + 1) if number % size == 0]


def test_a_number_of_which_all_could_not_be_tried_has_its_divisors_too():
    assert divisors(2**40) == [2**power for power in range(41)]
