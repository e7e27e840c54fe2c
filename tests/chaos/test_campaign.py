"""A campaign with a fixed seed finds no error, and its verdict detects lost and changed results."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.verdict import compare
from tests.child_processes import DEADLINE_SECONDS
from tests.programs import run
from tests.sweep.small_sweep import command


@pytest.mark.slow
def test_a_verdict_sees_lost_runs_changed_results_and_leftovers(tmp_path):
    reference, outputs = tmp_path / "reference", tmp_path / "outputs"
    keys = ("trainer.max_steps=2", "trainer.val_every=2", "trainer.pes_every=0", "seed=0")
    done = run("train.py", *command(reference, tmp_path / "data", *keys)[2:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    def undamaged() -> Path:
        shutil.rmtree(outputs, ignore_errors=True)
        return shutil.copytree(reference, outputs)

    assert compare(reference, undamaged()).lines == []

    file = next(undamaged().glob("default/lbl-*/metrics.jsonl"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    next(row for row in rows if "train/loss" in row)["train/loss"] *= 1 + 2**-52
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    verdict = compare(reference, outputs)
    assert (verdict.lost, len(verdict.changed), verdict.other) == ([], 1, [])
    assert "train/loss" in verdict.changed[0]

    first, second = sorted(path.parent for path in undamaged().glob("default/*/config.yaml"))
    shutil.copytree(first, first.with_name("copy"))
    shutil.rmtree(second)
    verdict = compare(reference, outputs)
    assert verdict.lost == [second.name]
    assert verdict.other == ["copy is one run too many"]

    folder = next(undamaged().glob("default/lbl-*"))
    (folder / ".metrics.jsonl.4711").touch()
    (folder / "checkpoints" / "step-00000002.ckpt").touch()
    with (folder / "console.log").open("a") as console:
        console.write('Traceback (most recent call last):\n  File "a.py"\n    b()\nKeyError: 3\n')
    other = compare(reference, outputs).other
    assert len(other) == 3
    assert other[-1].endswith("console.log: KeyError: 3")


@pytest.mark.slow
def test_a_campaign_loses_no_run_and_changes_no_result():
    options = ["--rounds", "1", "--faults", "3", "--seed", "0", "--seconds", str(2 * DEADLINE_SECONDS)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.campaign", *options, "seed=0"],
        cwd=Path(__file__).parents[2],
        text=True,
        timeout=2 * DEADLINE_SECONDS,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    faults, _, rest = done.stdout.splitlines()[-1].partition(" ")
    assert int(faults) > 0
    assert rest == "faults injected, 0 runs lost, 0 results changed"
