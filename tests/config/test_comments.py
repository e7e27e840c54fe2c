"""The comments beside the keys in conf/ are the schema's meanings."""

import shutil

import pytest
import yaml

from simbal.config.schema import every_key
from tests.conftest import CONF

FILE = """\
# what the option is for
defaults: [other]
width: 3 # an old comment
names: {a: 1}
text: "a: b"   # kept
an_address_longer_than_the_others: https://host/file
# a line of its own
parts:
  width: 1   # of a part
"""
MEANINGS = {"width": "in signs", "names": "by letter", "an_address_longer_than_the_others": "URL", "parts": "of it"}


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


def test_a_changed_meaning_changes_the_files_and_no_value(comments, conf, monkeypatch):
    key = next(key for name, _, key in every_key() if name == "trainer.max_steps")
    monkeypatch.setitem(vars(key), "meaning", "how many")
    comments.write_comments(conf)
    changed = {str(name) for name, text in files(conf).items() if text != files(CONF)[name]}
    assert changed == {f"trainer/{name}.yaml" for name in ("bench", "default", "paper_l", "paper_m")}
    assert "\nmax_steps: 1000         # how many\n" in (conf / "trainer/default.yaml").read_text()
    for name, text in files(conf).items():
        assert yaml.safe_load(text) == yaml.safe_load(files(CONF)[name])


def test_meanings_stand_aligned_and_all_else_stays(comments):
    assert comments.commented(FILE, MEANINGS).splitlines() == [
        "# what the option is for",
        "defaults: [other]",
        "width: 3       # in signs",
        "names: {a: 1}  # by letter",
        'text: "a: b"   # kept',
        "an_address_longer_than_the_others: https://host/file  # URL",
        "# a line of its own",
        "parts:         # of it",
        "  width: 1   # of a part",
    ]


def test_every_key_has_a_meaning_of_one_line_that_fits(comments):
    assert [name for name, _, key in every_key() if not key.meaning or "\n" in key.meaning] == []
    described = [file for file, _ in comments.described(CONF)]
    long = [(file.name, line) for file in described for line in file.read_text().splitlines() if len(line) > 120]
    assert long == []
