"""Credentials are kept out of saved configs, and nested dicts become dotted keys."""

import pytest

from simbal.config.values import flatten, require_no_credentials
from simbal.errors import UserError


def test_flatten_returns_every_value_by_its_dotted_key():
    nested = {"a": 1, "b": {"c": {"d": 2}, "e": [3]}, "f": {}}
    assert flatten(nested) == {"a": 1, "b.c.d": 2, "b.e": [3], "f": {}}


def test_urls_with_credentials_are_refused_and_others_accepted():
    for url in (
        "https://ada:pass@host/a.jsonl", "https://ada@host/a.jsonl", "https://host/a.jsonl?part=3&access_token=T",
        "https://host/a.jsonl?X-Amz-Signature=0", "postgresql+psycopg2://ada:p@ss@host/db",
        ["a.jsonl", "https://host/a?sig=1"],
    ):  # fmt: skip
        with pytest.raises(UserError, match="data.files has a user name, a password or a token"):
            require_no_credentials("data.files", url)
    for url in (
        None, "a@b.jsonl", "https://host:80/a@b.jsonl?part=3", "hf://datasets/owner/name@main/a.parquet",
        "postgresql+psycopg2://host/db?sslmode=require", "s3://bucket/a.jsonl", ["a.txt", "b.txt"],
    ):  # fmt: skip
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
def test_address_in_a_config_must_not_have_credentials(small_spec, keys):
    with pytest.raises(UserError, match="password") as refused:
        small_spec(*keys)
    assert "ada" not in str(refused.value)
