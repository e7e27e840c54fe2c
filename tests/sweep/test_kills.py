"""A sweep that is killed at two random moments ends in the same table as one that is left alone."""

import random
import signal
import subprocess
import time

import pytest

from tests.sweep.small_sweep import command, results

pytestmark = pytest.mark.slow
KILLS = 2


def test_the_table_and_every_loss_are_bit_equal(tmp_path, cache_dir):
    left_alone, killed = tmp_path / "a", tmp_path / "b"
    subprocess.run(command(left_alone, cache_dir), check=True, capture_output=True)
    draws = random.Random(0)
    kills = 0
    while kills < KILLS:
        sweep = subprocess.Popen(command(killed, cache_dir), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(draws.uniform(0.5, 9.0))
        if sweep.poll() is not None:  # it was finished before: begin again elsewhere
            assert sweep.returncode == 0
            assert results(killed) == results(left_alone)
            killed = tmp_path / f"b{kills}"
            continue
        sweep.send_signal(signal.SIGKILL)
        sweep.wait()
        kills += 1
    subprocess.run(command(killed, cache_dir), check=True, capture_output=True)
    assert results(killed) == results(left_alone)
