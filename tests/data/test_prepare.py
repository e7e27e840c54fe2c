import subprocess
import sys
from pathlib import Path

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


def test_several_configs_at_once_are_refused_before_a_sweep_can_start(tmp_path):
    done = prepare(tmp_path, "-m", "data=synthetic", "seed=0,1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: prepare.py takes one config at a time: leave out -m\n"
    assert not list(tmp_path.iterdir())
