"""A config.yaml that is read block by block is what PyYAML reads."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from simbal import saved_yaml

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True) | st.text(), VALUES))
def test_it_reads_what_pyyaml_reads(mapping):
    text = yaml.safe_dump(mapping, sort_keys=False)
    assert saved_yaml.parse(text) == yaml.load(text, yaml.CSafeLoader)


def test_references_between_blocks_are_followed():
    shared = [1, 2]
    text = yaml.safe_dump({"first": shared, "second": {"third": shared}})
    assert "&id" in text
    assert saved_yaml.parse(text) == {"first": [1, 2], "second": {"third": [1, 2]}}


def test_readers_do_not_share_what_they_read():
    text = "data:\n  files: [a]\nseed: 1\n"
    saved_yaml.parse(text)["data"]["files"].append("b")
    assert saved_yaml.parse(text)["data"]["files"] == ["a"]


@pytest.mark.parametrize("text", ["", "- 1", "seed: [", "seed", "3", "a: 1\n b: 2"])
def test_what_is_no_mapping_is_an_error(text):
    with pytest.raises((yaml.YAMLError, TypeError, ValueError)):
        saved_yaml.parse(text)
