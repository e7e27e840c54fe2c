"""A sweep that is killed at two random moments has the same results as an uninterrupted one."""

import random
import signal

import pytest

from tests.child_processes import wait_until
from tests.programs import Program
from tests.sweep.small_sweep import command, results


@pytest.mark.slow
def test_the_table_and_every_loss_are_bit_equal(tmp_path, cache_dir):
    def start(folder) -> Program:
        return Program(*command(folder, cache_dir)[1:], cwd=tmp_path)

    def num_rows(folder) -> int:
        return sum(file.read_text().count("\n") for file in folder.glob("default/*/*.jsonl"))

    whole, killed = tmp_path / "a", tmp_path / "b"
    assert start(whole).completed().returncode == 0
    for moment in sorted(random.Random(0).sample(range(1, 160), 2)):  # the four runs have 240 rows
        sweep = start(killed)
        wait_until(lambda moment=moment: num_rows(killed) >= moment)
        sweep.kill()
        assert sweep.completed().returncode == -signal.SIGKILL
    assert start(killed).completed().returncode == 0
    assert results(killed) == results(whole)
