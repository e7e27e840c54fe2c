"""The program prepare.py, and the function that does its work."""

from pathlib import Path

import pytest
import yaml

from simbal.data.check import prepare_or_check
from simbal.errors import UserError
from tests.conftest import CONF
from tests.programs import run

FILES = yaml.safe_load((CONF / "data" / "files.yaml").read_text())


def prepare(folder, *overrides):
    return run("prepare.py", f"data.cache_dir={folder}/cache", *overrides, cwd=folder)


@pytest.fixture
def corpus(tmp_path, jsonl):
    """The group `data` as Hydra composes it, for a corpus of two hundred documents."""
    path = jsonl([f"text number {number}" for number in range(200)])
    return FILES | {"files": str(path), "cache_dir": str(tmp_path / "cache")}


def test_the_command_prepares_text_and_says_what_it_holds(tmp_path, jsonl):
    train, held_out = jsonl(["one two", "three"]), jsonl(["four"], "held_out.jsonl")
    done = prepare(tmp_path, "data=files", f"data.files={train}", f"data.validation_files={held_out}")
    assert done.returncode == 0, done.stderr
    assert "train: 2 documents, " in done.stdout
    assert "validation: 1 documents, " in done.stdout
    assert "tokens fingerprint " in done.stdout
    assert list((tmp_path / "cache").glob("files-*"))


def test_a_finished_preparation_is_checked_on_request(corpus):
    with pytest.raises(UserError, match="nothing is prepared yet in"):
        prepare_or_check(corpus, True)
    prepare_or_check(corpus, False)
    assert "text number" in "\n".join(prepare_or_check(corpus, True))
    (tokens,) = Path(corpus["cache_dir"]).glob("files-*/train/tokens.bin")
    damaged = bytearray(tokens.read_bytes())
    damaged[10] ^= 1
    tokens.write_bytes(damaged)
    with pytest.raises(UserError, match="train/tokens.bin"):
        prepare_or_check(corpus, True)
