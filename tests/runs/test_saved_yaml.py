"""A config.yaml that is read block by block is what PyYAML reads."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from simbal.runs import folder as saved_yaml

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True) | st.text(), VALUES))
def test_it_reads_what_pyyaml_reads(mapping):
    text = yaml.safe_dump(mapping, sort_keys=False)
    assert saved_yaml.parse_config(text) == yaml.load(text, yaml.CSafeLoader)


@given(st.dictionaries(st.text(), VALUES))
def test_it_reads_what_it_writes(mapping):
    assert saved_yaml.parse_config(saved_yaml.config_text({"a": 1, **mapping})) == {"a": 1, **mapping}


@pytest.mark.parametrize("text", ["a: !!python/object/apply:os.system ['touch pwned']", "a: !!python/name:os.system"])
def test_tags_of_python_are_an_error_and_nothing_is_executed(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((yaml.YAMLError, TypeError, ValueError)):
        saved_yaml.parse_config(text)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("text", ["", "- 1", "seed: [", "seed", "3", "a: 1\n b: 2"])
def test_what_is_no_mapping_is_an_error(text):
    with pytest.raises((yaml.YAMLError, TypeError, ValueError)):
        saved_yaml.parse_config(text)
