"""Processor time that a sweep takes for each of its jobs before the first starts.

python benchmarks/dry_run.py [jobs]: a dry run of so many and one of a single job, in a temporary folder.
"""

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

TRAIN = Path(__file__).parents[1] / "train.py"
ARMS = ("balancing=simbal,lbl", "optim.lr=1e-3,2e-3")  # four, on as many seeds as it takes


def seconds(*arguments: str) -> float:
    """Return the processor time of one dry run, its imports included."""
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, str(TRAIN), "-m", "dry_run=true", f"output_dir={folder}", *arguments]
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the seconds of both, and what each further job takes."""
    jobs = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    many, one = seconds(*ARMS, f"seed=0-{jobs // 4 - 1}"), seconds("seed=0")
    print(f"{jobs} jobs: {many:.1f} s; one: {one:.1f} s; each further one: {(many - one) / (jobs - 1) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
