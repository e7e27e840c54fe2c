"""What is said of single values, and dotted keys."""

from hypothesis import given
from hypothesis import strategies as st

from simbal.config.values import flatten

KEYS = st.text("ab", min_size=1)


def leaves(node):
    return sum(map(leaves, node.values())) if isinstance(node, dict) and node else 1


@given(st.dictionaries(KEYS, st.recursive(st.integers(), lambda nested: st.dictionaries(KEYS, nested))))
def test_flatten_keeps_every_value_under_its_dotted_key(nested):
    flat = flatten(nested)
    assert len(flat) == sum(map(leaves, nested.values()))
    for key, value in flat.items():
        node = nested
        for part in key.split("."):
            node = node[part]
        assert node == value
