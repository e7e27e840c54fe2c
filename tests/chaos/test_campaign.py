"""What a fault breaks is seen, and a campaign of a fixed seed finds nothing."""

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

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A sweep that is left alone, of six steps."""
    folder = tmp_path_factory.mktemp("reference")
    keys = ("trainer.max_steps=6", "trainer.val_every=3", "trainer.pes_every=3", "seed=0")
    _, program, *arguments = command(folder, folder / "data", *keys)
    done = run(program, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def outputs(reference, tmp_path):
    """A copy of it, to be spoilt."""
    return shutil.copytree(reference, tmp_path / "outputs")


@pytest.mark.slow
def test_a_copy_of_a_sweep_is_the_same(reference, outputs):
    assert compare(reference, outputs).lines == []


@pytest.mark.slow
def test_one_loss_that_differs_in_its_last_bit_is_counted(reference, outputs):
    file = next(outputs.glob("default/lbl-*/metrics.jsonl"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    place = next(i for i, row in enumerate(rows) if "train/loss" in row)
    rows[place]["train/loss"] *= 1 + 2**-52
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    verdict = compare(reference, outputs)
    assert (verdict.lost, len(verdict.changed), verdict.other) == ([], 1, [])
    assert f"row {place + 1}, train/loss" in verdict.changed[0]


@pytest.mark.slow
def test_a_value_of_the_table_that_differs_is_counted(reference, outputs):
    file = outputs / "default" / "table.json"
    table = json.loads(file.read_text())
    table["arms"][0]["summaries"]["val/ppl"]["mean"] *= 2
    file.write_text(json.dumps(table))
    assert compare(reference, outputs).changed == ["the table, of runs that are the same"]


@pytest.mark.slow
def test_a_run_that_is_gone_is_lost_and_one_that_is_there_twice_is_wrong(reference, outputs):
    first, second = sorted(path.parent for path in outputs.glob("default/*/config.yaml"))
    shutil.copytree(first, first.with_name("copy"))
    shutil.rmtree(second)
    verdict = compare(reference, outputs)
    assert verdict.lost == [second.name]
    assert verdict.other == ["copy is one run too many"]


@pytest.mark.slow
def test_what_a_run_leaves_behind_is_seen(reference, outputs):
    run = next(outputs.glob("default/lbl-*"))
    (run / ".metrics.jsonl.4711").touch()
    (run / "checkpoints" / "step-00000003.ckpt").touch()
    with (run / "console.log").open("a") as console:
        console.write('Traceback (most recent call last):\n  File "a.py"\n    b()\nKeyError: 3\n')
    other = compare(reference, outputs).other
    assert len(other) == 3
    assert other[-1].endswith("console.log: KeyError: 3")


@pytest.mark.slow
def test_a_campaign_ends_with_nothing_lost_and_nothing_changed():
    seconds = 2 * DEADLINE_SECONDS
    options = ["--rounds", "1", "--seed", "0", "--seconds", str(seconds)]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.chaos.campaign", *options],
        cwd=REPOSITORY,
        text=True,
        timeout=seconds,
        capture_output=True,
        check=False,
    )
    *_, last = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "round 1 (" in ended.stdout
    faults, _, rest = last.partition(" ")
    assert int(faults) > 0
    assert rest == "faults injected, 0 runs lost, 0 results changed"
