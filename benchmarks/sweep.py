"""How much faster a sweep is than its runs one after another.

python benchmarks/sweep.py [key=value ...]: ten runs twice, in a temporary folder; the data must be prepared.
"""

import resource
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
    """Print the seconds of both, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"output_dir={folder}", *KEYS, *sys.argv[1:]]
        swept = measure(["-m", "name=swept", f"balancing={','.join(STRATEGIES)}", f"seed={','.join(SEEDS)}", *keys])
        each = [measure(["name=alone", f"balancing={s}", f"seed={n}", *keys]) for s, n in product(STRATEGIES, SEEDS)]
    alone = tuple(map(sum, zip(*each, strict=True)))
    for title, (clock, cpu) in (("one sweep", swept), ("one after another", alone)):
        print(f"{title}: {clock:.1f} s, {cpu:.1f} s of processor time")
    print(f"ratio: {swept[0] / alone[0]:.2f} of the time, {swept[1] / alone[1]:.2f} of the processor time")


def measure(arguments: list[str]) -> tuple[float, float]:
    """Seconds on the clock and of processor time, children and theirs included, of one command."""
    started, before = time.perf_counter(), _cpu_seconds()
    subprocess.run([sys.executable, str(TRAIN), *arguments], check=True, capture_output=True)
    return time.perf_counter() - started, _cpu_seconds() - before


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
