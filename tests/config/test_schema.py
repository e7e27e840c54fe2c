"""The schema and conf/ have the same keys, and what a key says of itself is enforced."""

import math

import pytest
import yaml

from simbal.config.check import typed
from simbal.config.schema import DATA, GROUPS, LOGGERS, Config, every_key, fields_of, integer_keys
from simbal.errors import UserError
from tests.config.any_form import with_key
from tests.conftest import CONF
from tests.run_folders import changed

BOUNDED = [*dict.fromkeys(name for name, _, key in every_key() if key.bounded)]
KEYS = {name: (kind, key) for name, kind, key in every_key()}


def keys_in(path):
    return yaml.safe_load(path.read_text()).keys() - {"defaults", "hydra"}


def schema_of(group, path):
    forms = {"data": DATA, "logger": LOGGERS}.get(group)
    return forms[path.stem] if forms else fields_of(Config)[group].kind


@pytest.mark.parametrize("group", [group for group in GROUPS if group != "balancing"])
def test_a_group_and_its_files_have_the_same_keys(group):
    given = {}
    for path in (CONF / group).glob("*.yaml"):
        schema = schema_of(group, path)
        assert keys_in(path) <= fields_of(schema).keys(), path
        given.setdefault(schema, set()).update(keys_in(path))
    assert given == {schema: set(fields_of(schema)) for schema in given}


def test_what_is_no_group_is_in_the_main_file():
    assert keys_in(CONF / "config.yaml") == fields_of(Config).keys() - {*GROUPS}


@pytest.mark.parametrize(("group", "forms"), [("data", DATA), ("logger", LOGGERS)])
def test_every_form_of_a_group_has_a_file_by_its_name(group, forms):
    assert {path.stem for path in (CONF / group).glob("*.yaml")} == {*forms}


def outside(kind, key):
    """Numbers that are just out of bounds, and such that are no finite numbers."""
    step = 1e-9 if kind is float else 1
    bounds = [(key.least, -step), (key.most, step), (key.above, 0), (key.above, -step)]
    return [bound + further for bound, further in bounds if bound is not None] + [math.inf, math.nan] * (kind is float)


def inside(kind, key):
    """The smallest and the largest number that are allowed."""
    step = 1e-9 if kind is float else 1
    return [bound for bound in (key.least, key.most) if bound is not None] + [step] * (key.above == 0)


@pytest.mark.parametrize("name", BOUNDED)
def test_every_bound_is_enforced_and_no_tighter(base_spec, name):
    kind, key = KEYS[name]
    plain = with_key(base_spec.written, name)
    for value in inside(kind, key):
        typed(Config, changed(plain, {name: value}))
    refused = outside(kind, key)
    assert refused
    for value in refused:
        with pytest.raises(UserError, match=f"^{name}={value} must (be|lie between) "):
            typed(Config, changed(plain, {name: value}))


def test_integer_keys_are_those_that_take_spans():
    keys = integer_keys()
    assert {"seed", "trainer.max_steps", "model.top_k", "data.vocab_size", "data.branching"} <= keys
    assert not keys & {"optim.lr", "name", "data.strict", "trainer.progress_bar"}
