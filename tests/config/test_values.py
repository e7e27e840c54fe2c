"""What is said of single values, and dotted keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simbal.config.values import flatten, require_no_credentials
from simbal.errors import UserError

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


@pytest.mark.parametrize(
    "url",
    [
        "https://ada:pass@host/a.jsonl", "https://ada@host/a.jsonl", "https://host/a.jsonl?part=3&access_token=T",
        "https://host/a.jsonl?X-Amz-Signature=0", "postgresql+psycopg2://ada:p@ss@host/db",
        ["a.jsonl", "https://host/a?sig=1"],
    ],
)  # fmt: skip
def test_a_url_with_credentials_is_refused_and_not_shown(url):
    with pytest.raises(UserError, match="data.files has a user name, a password or a token in its URL.*environment"):
        require_no_credentials("data.files", url)


@pytest.mark.parametrize(
    "url",
    [
        None, "a@b.jsonl", "https://host:80/a@b.jsonl?part=3", "hf://datasets/owner/name@main/a.parquet",
        "postgresql+psycopg2://host/db?sslmode=require", "s3://bucket/a.jsonl", ["a.txt", "b.txt"],
    ],
)  # fmt: skip
def test_other_addresses_are_taken(url):
    require_no_credentials("data.files", url)


@pytest.mark.parametrize(
    "keys",
    [
        ("data=files", "data.files='https://ada:pass@host/a.jsonl'"),
        ("data=files", "data.files=a.jsonl", "data.validation_files='https://ada:pass@host/a.jsonl'"),
        ("data=dclm", "data.location='https://ada:pass@host/{shard}.jsonl'"),
        ("logger=mlflow", "logger.tracking_uri='http://ada:pass@host:5000'"),
    ],
)
def test_no_address_of_a_run_may_have_credentials(small_spec, keys):
    with pytest.raises(UserError, match="password") as refused:
        small_spec(*keys)
    assert "ada" not in str(refused.value)
