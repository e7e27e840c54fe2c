"""Fixtures for the data tests: validated keys of conf/data and small files to read."""

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from simbal.config.compose import validate_data
from simbal.config.schema import DataConfig
from simbal.data.prepare import open_source

CONF = Path(__file__).parents[2] / "conf" / "data"


@pytest.fixture(scope="session")
def load_keys():
    """`load_keys("files", cache_dir, files=...)`: the keys of conf/data/files.yaml with some replaced."""

    def load(source: str, cache_dir: Path, **changed) -> DataConfig:
        shipped = yaml.safe_load((CONF / f"{source}.yaml").read_text())
        return validate_data({**shipped, "cache_dir": str(cache_dir), **changed})

    return load


@pytest.fixture
def keys(load_keys, tmp_path):
    """The same with the test's own cache, `tmp_path / "cache"`."""
    return lambda source, **changed: load_keys(source, tmp_path / "cache", **changed)


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
