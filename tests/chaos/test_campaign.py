"""The faults do what they say, what they break is seen, and a campaign of a fixed seed finds nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.chaos.faults import FAULTS, FULL_DISK, Bag, flip, truncate
from tests.chaos.scene import Scene
from tests.chaos.small_disk import SmallDisk, mountable
from tests.chaos.verdict import compare, traceback
from tests.child_processes import DEADLINE_SECONDS
from tests.programs import run
from tests.sweep.small_sweep import command

REPOSITORY = Path(__file__).parents[2]
INJECT = {fault.kind: fault.inject for fault in (*FAULTS, FULL_DISK)}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run" / "checkpoints" / "step-00000007.ckpt"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(range(256)) * 40)
    return path


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


@pytest.mark.parametrize("seed", range(20))
def test_flip_changes_one_bit_and_truncate_cuts_something_off(file, seed):
    before = file.read_bytes()
    flip(file, Random(seed))
    after = file.read_bytes()
    assert sum((a ^ b).bit_count() for a, b in zip(before, after, strict=True)) == 1
    truncate(file, Random(seed))
    assert len(file.read_bytes()) < len(after)
    assert after.startswith(file.read_bytes())


@pytest.mark.parametrize("kind", ["flip_checkpoint", "truncate_record"])
def test_damage_is_counted_if_there_was_something_to_damage(tmp_path, kind):
    scene = Scene(tmp_path, tmp_path / "data")
    INJECT[kind](kind, scene, Random(0))
    assert scene.injected == []
    checkpoints = scene.outputs / "default" / "a-run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for path in (checkpoints / "step-00000007.ckpt", checkpoints / "../record.json"):
        path.write_text('{"status": "killed"}')
    INJECT[kind](kind, scene, Random(0))
    assert scene.injected == [kind]
    assert kind in (tmp_path / "events.txt").read_text()


@pytest.mark.parametrize("kind", ["kill_job SIGKILL", "kill_sweep SIGTERM", "full_disk", "second_sweep"])
def test_what_finds_no_sweep_does_not_count(tmp_path, kind):
    scene = Scene(tmp_path, tmp_path / "data")
    INJECT[kind](kind, scene, Random(0))
    assert scene.injected == []
    assert scene.sweeps == []


def test_a_small_disk_is_full_until_it_is_not(tmp_path):
    if not mountable(tmp_path / "mounts"):
        pytest.skip("this user may not mount")
    with SmallDisk(tmp_path / "disk") as disk:
        with disk.filled(8192):
            (disk.place / "fits").write_bytes(bytes(4096))
            with pytest.raises(OSError, match="No space left"):
                (disk.place / "too_much").write_bytes(bytes(65_536))
        (disk.place / "fits_now").write_bytes(bytes(65_536))
    assert not os.path.ismount(tmp_path / "disk")


def test_a_bag_gives_the_same_faults_for_the_same_seed_and_each_as_often_as_it_weighs():
    def drawn(seed):
        bag = Bag(FAULTS, seed)
        return [bag.draw() for _ in range(sum(fault.weight for fault in FAULTS))]

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert [(fault.kind, draws.random()) for fault, draws in first] == [
        (fault.kind, draws.random()) for fault, draws in again
    ]
    assert [fault.kind for fault, _ in first] != [fault.kind for fault, _ in other]
    for fault in FAULTS:
        assert [drawn.kind for drawn, _ in first].count(fault.kind) == fault.weight


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
def test_a_speed_that_differs_is_not(reference, outputs):
    file = next(outputs.glob("default/lbl-*/metrics.jsonl"))
    file.write_text(file.read_text().replace('"tokens_per_second": ', '"tokens_per_second": 9'))
    assert compare(reference, outputs).lines == []


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


def test_a_traceback_that_was_broken_off_is_one(tmp_path):
    console = tmp_path / "console.log"
    console.write_text("error: no space left\n")
    assert traceback(console) is None
    console.write_text('Traceback (most recent call last):\n  File "a.py"\n')
    assert traceback(console) == f"{console}: a traceback without an end"


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
