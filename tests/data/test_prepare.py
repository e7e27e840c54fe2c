import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def prepare(folder, *overrides):
    command = [sys.executable, str(ROOT / "prepare.py"), f"data.cache_dir={folder}/cache", *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


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


def test_several_configs_at_once_are_refused(tmp_path):
    done = prepare(tmp_path, "-m", "data=synthetic")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: prepare.py takes one config at a time: leave out -m\n"
    assert not list(tmp_path.iterdir())


def test_a_finished_preparation_is_checked_on_request(tmp_path, jsonl):
    corpus = jsonl([f"text number {number}" for number in range(200)])
    keys = ("data=files", f"data.files={corpus}")
    missing = prepare(tmp_path, *keys, "check=true")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "nothing is prepared yet in" in missing.stderr
    assert prepare(tmp_path, *keys).returncode == 0
    good = prepare(tmp_path, *keys, "check=true")
    assert good.returncode == 0, good.stderr
    assert "text number" in good.stdout
    (tokens,) = (tmp_path / "cache").glob("files-*/train/tokens.bin")
    damaged = bytearray(tokens.read_bytes())
    damaged[10] ^= 1
    tokens.write_bytes(damaged)
    bad = prepare(tmp_path, *keys, "check=true")
    assert (bad.returncode, bad.stdout) == (1, "")
    assert "train/tokens.bin" in bad.stderr


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("check=maybe", "check=maybe must be true or false"),
        ("model=tiny", "there is no key model"),
        ("data.vocab_size=100", "data.vocab_size=100 must lie between 257 and 100257"),
        ("data.threads=0", "data.threads=0 must be null or at least 1"),
        ("data.threads=many", "data.threads"),
    ],
)
def test_nonsense_is_refused(tmp_path, override, says):
    done = prepare(tmp_path, override)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert says in done.stderr
    assert "Traceback" not in done.stderr
