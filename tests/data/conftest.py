"""Fixtures for the data tests: validated keys of conf/data and small files to read."""

import json
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from simbal.config.compose import validate_data
from simbal.config.schema import DataConfig
from simbal.data.prepare import open_source
from simbal.data.tokenizer import load_tokenizer
from tests.conftest import CONF

load_tokenizer_once = cache(load_tokenizer)


def decode(store, split) -> list[str]:
    """The documents of a split."""
    encoding, ids = load_tokenizer_once(store.meta["vocab_size"]).encoding, store.tokens(split)
    ends = [0, *store.document_ends(split).tolist()]
    return [encoding.decode_bytes(ids[start : end - 1].tolist()).decode() for start, end in pairwise(ends)]


@pytest.fixture(scope="session")
def load_keys():
    """`load_keys("files", cache_dir, files=...)`: the keys of conf/data/files.yaml with some replaced."""

    def load(source: str, cache_dir: Path, **changed) -> DataConfig:
        shipped = yaml.safe_load((CONF / f"data/{source}.yaml").read_text())
        return validate_data({**shipped, "cache_dir": str(cache_dir), **changed})

    return load


@pytest.fixture
def keys(load_keys, tmp_path):
    """The same; the default `cache_dir` is `tmp_path / "cache"`."""
    return lambda source, cache_dir=tmp_path / "cache", **changed: load_keys(source, cache_dir, **changed)


@pytest.fixture
def jsonl(tmp_path):
    """`jsonl(["one", "two"])`: a file with one record for each text."""

    def write(texts, name="corpus.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return path

    return write


@pytest.fixture
def texts(tmp_path, keys):
    """`texts("a.jsonl", content)`: the documents of a file with this content, and what was skipped."""

    def read(name, content, **changed):
        (tmp_path / name).write_bytes(content)
        skipped = Counter()
        source = open_source(keys("files", files=str(tmp_path / name), **changed))
        return [document.content.decode() for document in source.read(*source.inputs(), skipped)], +skipped

    return read


@pytest.fixture
def read_url(keys):
    """`read_url(url)`: the texts of the files behind it."""

    def read(url):
        source = open_source(keys("files", files=url))
        return [document.content for name in source.inputs() for document in source.read(name, Counter())]

    return read
