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


def test_bad_input_ends_the_command_with_one_sentence(tmp_path):
    (tmp_path / "bad.jsonl").write_text("no json\n")
    done = prepare(tmp_path, "data=files", "data.files=bad.jsonl")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path}/bad.jsonl, line 1: this is not JSON")
    assert "Traceback" not in done.stderr


def test_a_value_that_makes_no_sense_ends_the_command_with_one_sentence(tmp_path):
    done = prepare(tmp_path, "data.threads=many")
    assert (done.returncode, done.stdout) == (1, "")
    assert "data.threads" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"vocab_size": 100}, "data.vocab_size=100 must lie between 257 and 100257"),
        ({"threads": 0}, "data.threads=0 must be null or at least 1"),
        ({"threads": "many"}, "data.threads"),
    ],
)
def test_nonsense_is_refused_before_anything_is_made(corpus, keys, says):
    with pytest.raises(UserError, match=says):
        prepare_or_check(corpus | keys, False)
    assert not Path(corpus["cache_dir"]).exists()


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
