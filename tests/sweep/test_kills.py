"""A sweep that is killed at ten random moments ends in the same table as one that is left alone."""

import json
import random
import signal
import subprocess
import sys
import time

from tests.conftest import CONF, MARKOV, SMALL

KILLS = 10
RUNS = ("balancing=lf_simbal,lbl", "seed=0-1", "trainer.max_steps=60", "trainer.ckpt_every=7", "trainer.val_every=10")


def command(folder, cache_dir):
    keys = (*[key for key in SMALL if "max_steps" not in key and "_every" not in key], *MARKOV, *RUNS)
    places = (f"output_dir={folder}", f"data.cache_dir={cache_dir}", "trainer.log_every=1", "trainer.pes_every=9")
    return [sys.executable, str(CONF.parent / "train.py"), "-m", *keys, *places]


def results(folder):
    """The table without its speeds, and every loss of every run."""
    table = json.loads((folder / "default" / "table.json").read_text())
    for arm in table["arms"]:
        for run in arm["runs"]:
            run.pop("folder")
            run["values"].pop("tokens_per_second")
        arm["summaries"].pop("tokens_per_second")
    curves = {}
    for file in sorted((folder / "default").glob("*/metrics.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        curves[file.parent.name] = [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]
    return table["arms"], curves


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
