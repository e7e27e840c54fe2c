"""The comments beside the keys in conf/ are the schema's meanings."""

import shutil

import pytest

from simbal.config.schema import every_key
from tests.conftest import CONF


@pytest.fixture
def conf(tmp_path):
    """A copy of the whole folder."""
    return shutil.copytree(CONF, tmp_path / "conf", symlinks=True)


@pytest.fixture
def comments(monkeypatch):
    monkeypatch.syspath_prepend(CONF.parent / "docs")
    from generators import comments

    return comments


def files(conf):
    return {path.relative_to(conf): path.read_text() for path in conf.rglob("*.yaml")}


def test_they_are_as_the_generator_writes_them(comments, conf):
    comments.write_comments(conf)
    assert files(conf) == files(CONF)


def test_every_key_has_a_meaning_of_one_line_that_fits(comments):
    assert [name for name, field in every_key().items() if not field.description or "\n" in field.description] == []
    described = [file for file, _ in comments.described(CONF)]
    long = [(file.name, line) for file in described for line in file.read_text().splitlines() if len(line) > 120]
    assert long == []
