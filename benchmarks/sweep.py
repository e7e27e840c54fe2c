"""Speed-up of a sweep over separate runs: python -m benchmarks.sweep [key=value ...]

Trains ten runs twice, in a temporary folder; the data must be prepared.
"""

import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

TRAIN = Path(__file__).parents[1] / "train.py"
KEYS = ("trainer.max_steps=100", "trainer.val_every=100", "trainer.progress_bar=false")
STRATEGIES, SEEDS = ("simbal", "lbl"), ("0", "1", "2", "3", "4")


def main() -> None:
    """Print the seconds of both and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"output_dir={folder}", *KEYS, *sys.argv[1:]]
        swept = measure(["-m", "name=swept", f"balancing={','.join(STRATEGIES)}", f"seed={','.join(SEEDS)}", *keys])
        each = [measure(["name=alone", f"balancing={s}", f"seed={n}", *keys]) for s, n in product(STRATEGIES, SEEDS)]
    print(f"one sweep: {swept:.1f} s; separate runs: {sum(each):.1f} s; ratio {swept / sum(each):.2f}")


def measure(arguments: list[str]) -> float:
    """Return the wall-clock seconds of one command."""
    started = time.perf_counter()
    subprocess.run([sys.executable, str(TRAIN), *arguments], check=True, capture_output=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
