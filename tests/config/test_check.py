"""A config is taken as it is, value for value, or refused with a sentence that names the key."""

import re
from types import NoneType
from typing import Literal, get_args, get_origin

import pytest

from simbal.config.check import checked
from simbal.config.schema import GROUPS, every_key
from simbal.errors import UserError
from tests.config.any_form import value_at, with_key, without
from tests.run_folders import changed

KINDS = {name: kind for name, kind, _ in every_key() if name.partition(".")[0] != "balancing"}
OF_OTHER_KINDS = {
    bool: [0, 1.0, "true", [], {}], int: [True, 1.0, "1", [], {}], float: [True, "1", [], {}],
    str: [1, 1.5, True, [], {}], list: [1, "a", {}, [{}]], dict: [1, "a", []],
}  # fmt: skip


def other_kinds(kind):
    """Values that are of any kind but this."""
    if get_origin(kind) is Literal:
        return [*OF_OTHER_KINDS[str], None, "no such choice"]
    kinds = [one for one in get_args(kind) if one is not NoneType] if NoneType in get_args(kind) else [kind]
    return [*OF_OTHER_KINDS[get_origin(kinds[0]) or kinds[0]], *([None] if kinds == [kind] else [])]


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
