"""Fraction of a run's CPU time spent in validation, in one process.

Example:
    OMP_NUM_THREADS=1 python -m benchmarks.validation_cost balancing=lbl trainer.max_steps=1500
"""

import sys
import tempfile
import time
from typing import Any

from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop

from benchmarks.composing import spec_of
from simbal.training.run import train


def main(overrides: list[str]) -> None:
    """Train the run of these overrides and print the time of its validations."""
    seconds: list[float] = []
    run = _EvaluationLoop.run

    def timed(loop: _EvaluationLoop) -> Any:
        started = time.process_time()
        try:
            return run(loop)
        finally:
            seconds.append(time.process_time() - started)

    _EvaluationLoop.run = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as out:
        spec = spec_of(*overrides, f"output_dir={out}")
        started = time.process_time()
        train(spec)
        whole = time.process_time() - started
    *early, last = seconds
    print(
        f"{len(seconds)} validations took {sum(seconds):.1f} s of {whole:.1f} s, {sum(seconds) / whole:.1%}: "
        f"{len(early)} along the way {sum(early):.1f} s, the one at the end {last:.1f} s"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
