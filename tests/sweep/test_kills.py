"""A sweep that is killed at two random moments ends in the same table as one that is left alone."""

import random
import signal

import pytest

from tests.child_processes import wait_until
from tests.programs import Program
from tests.sweep.small_sweep import command, results

pytestmark = pytest.mark.slow


def test_the_table_and_every_loss_are_bit_equal(tmp_path, cache_dir):
    def sweep(folder) -> Program:
        return Program(*command(folder, cache_dir)[1:], cwd=tmp_path)

    def rows(folder) -> int:
        return sum(file.read_text().count("\n") for file in folder.glob("default/*/*.jsonl"))

    left_alone, killed = tmp_path / "a", tmp_path / "b"
    assert sweep(left_alone).completed().returncode == 0
    for moment in sorted(random.Random(0).sample(range(1, 160), 2)):  # of the 240 rows that the four runs will have
        begun = sweep(killed)
        wait_until(lambda moment=moment: rows(killed) >= moment)
        begun.kill()
        assert begun.completed().returncode == -signal.SIGKILL
    assert sweep(killed).completed().returncode == 0
    assert results(killed) == results(left_alone)
