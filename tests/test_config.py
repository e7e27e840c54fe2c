"""Configs that cannot mean anything are refused, and every YAML file means something."""

import copy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simbal import config, config_check
from simbal.errors import UserError
from simbal.run_spec import GROUPS, config_hash
from simbal.training.run import train

CONF = Path(__file__).parents[1] / "conf"
HALF = ["trainer.micro_batch=4"]  # of the batch, for each of two devices
DENSE = ["balancing=none", "model.num_experts=0"]
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


KEYS = st.text("ab", min_size=1)


def changed(plain: dict, key: str, value) -> dict:
    result = copy.deepcopy(plain)
    *parents, last = key.split(".")
    node = result
    for parent in parents:
        node = node[parent]
    node[last] = value
    return result


@pytest.mark.parametrize("group", [g for g in GROUPS if g != "balancing"])
def test_an_unknown_key_in_any_group_is_refused(small_spec, group):
    plain = small_spec().config
    with pytest.raises(UserError, match="nonsense"):
        config_check.check(changed(plain, f"{group}.nonsense", 1))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("model.top_k", 5, "model.top_k=5 must lie between 1 and model.num_experts=4"),
        ("model.num_heads", 3, "model.d_model=16 must be a multiple of twice model.num_heads=3"),
        ("model.d_model", "wide", "model.d_model: .*wide"),
        ("router.gating", "tanh", "router.gating=tanh is not one of softmax, sigmoid"),
        ("trainer.micro_batch", 3, "trainer.global_batch=8 must be a multiple of trainer.micro_batch=3"),
        ("trainer.max_steps", 0, "trainer.max_steps=0 must be at least 1"),
        ("balancing.simbal.coef", -0.1, "balancing.simbal.coef=-0.1 must be a finite number of at least 0"),
        ("balancing.simbal.coef", float("nan"), "balancing.simbal.coef=nan must be a finite number of at least 0"),
        ("balancing.simbal.schedule", [[0, 1], [13, 0]], "ends at step 13, after the run \\(trainer.max_steps=12\\)"),
        ("optim.lr", float("nan"), "optim.lr=nan must be a finite number of at least 0"),
        ("model.num_experts", 0, "nothing to balance in a dense model"),
        ("data.source", "web", "data.source"),
        ("data.validation_tokens", 3, "data.validation_tokens=3 must be null or at least data.seq_len=16"),
        ("data.vocab_size", "???", "data.vocab_size has no value"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_what_is_allowed(small_spec, key, value, says):
    with pytest.raises(UserError, match=says):
        config_check.check(changed(small_spec().config, key, value))


def test_more_orthogonal_experts_than_dimensions_are_refused(small_spec):
    plain = changed(changed(small_spec().config, "model.num_experts", 17), "router.init", "orthogonal")
    with pytest.raises(UserError, match="17 rows cannot be orthogonal in model.d_model=16"):
        config_check.check(plain)


def test_a_real_corpus_needs_a_vocabulary_that_the_token_table_can_be_cut_to(small_spec):
    plain = small_spec("data=pysource", "data.vocab_size=257").config
    with pytest.raises(UserError, match="data.vocab_size=100258 must lie between 257 and 100257, or be 100277"):
        config_check.check(changed(plain, "data.vocab_size", 100_258))


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_says_in_its_first_line_what_it_is(small_spec, group, option):
    assert (CONF / group / f"{option}.yaml").read_text().startswith("# ")
    needed = {
        "files": ["data.files=corpus.txt"],
        "tiny_dense": DENSE,
        "dense_m": DENSE,
        "dense_l": DENSE,
        "ddp": HALF,
        "fsdp": HALF,
    }
    spec = small_spec(f"{group}={option}", *needed.get(option, []))
    assert spec.choices[group] == option


FOR_A_GPU = [("experts", "fused"), ("experts", "megablocks")]  # trained in tests/experts/megablocks_interpreted.py


@pytest.mark.parametrize(
    ("group", "option"), [pair for pair in OPTIONS if pair[0] not in ("data", "model") and pair not in FOR_A_GPU]
)
def test_every_option_trains(small_spec, group, option):
    spec = small_spec(f"{group}={option}", *(HALF if option in ("ddp", "fsdp") else []))
    train(spec)
    assert (spec.path / "record.json").exists()


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("name=other", True), ("logger=tensorboard", True), ("baseline=none", True), ("seed=1", False),
        ("balancing=lbl", False), ("optim.lr=0.02", False), ("trainer.max_steps=13", False), ("data.seed=1", False),
    ],
)  # fmt: skip
def test_the_hash_moves_exactly_when_the_result_can(small_spec, override, same):
    assert (config_hash(small_spec(override).config) == config_hash(small_spec().config)) == same


def test_folder_names_are_short_plain_and_readable(small_spec):
    name = small_spec("balancing=lbl", "seed=3").path.name
    assert name.startswith("lbl-tiny-seed3-")
    assert len(name) == len("lbl-tiny-seed3-") + 8


@settings(max_examples=50)
@given(st.dictionaries(KEYS, st.recursive(st.integers(), lambda nested: st.dictionaries(KEYS, nested))))
def test_flatten_keeps_every_value_under_its_dotted_key(nested):
    flat = config.flatten(nested)
    for key, value in flat.items():
        node = nested
        for part in key.split("."):
            node = node[part]
        assert node == value


def test_integer_keys_are_those_that_take_spans():
    keys = config.integer_keys()
    assert {"seed", "trainer.max_steps", "model.top_k", "data.vocab_size", "data.branching"} <= keys
    assert not keys & {"optim.lr", "name", "data.strict", "trainer.progress_bar"}
