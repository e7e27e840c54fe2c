"""How far the paired difference of two arms scatters over seeds, on drawn windows and on the whole validation split.

python benchmarks/paired_spread.py outputs/NAME TREATMENT BASELINE, such as simbal and lbl: prints the standard
deviation of the difference of losses over the seeds that both have, in nats, and what a validation costs.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev

from simbal.analysis.quality import document_sums
from simbal.analysis.shared.trained import load
from simbal.report.collect import Run, collect


def losses(runs: Mapping[int, Run]) -> dict[str, dict[int, float]]:
    """Return the final loss by seed: on the windows of the last point of the curve, and in the record."""
    return {
        "drawn windows": {seed: run.loss_curve[-1][1] for seed, run in runs.items()},
        "whole split": {seed: run.result["metrics"]["val/loss"] for seed, run in runs.items()},
    }


def seconds(run: Run, tokens: int | None) -> float:
    """Return the seconds of one pass over validation tokens, the second of two."""
    trained = load(run.path, "cpu")
    for _ in range(2):
        started = time.perf_counter()
        document_sums(trained, tokens, run.spec.config.trainer.micro_batch)
        taken = time.perf_counter() - started
    return taken


def main(folder: str, treatment: str, baseline: str) -> None:
    """Print the spread and the cost."""
    finished = [run for run in collect(Path(folder)) if run.finished]
    arms = [
        {run.seed: run for run in finished if run.spec.choices["balancing"] == name} for name in (treatment, baseline)
    ]
    theirs, ours = (losses(arm) for arm in reversed(arms))
    for measured_on, values in ours.items():
        differences = [values[seed] - theirs[measured_on][seed] for seed in sorted(values.keys() & theirs[measured_on])]
        print(
            f"{measured_on}: {len(differences)} pairs, mean {fmean(differences):+.4f}, sd {stdev(differences):.4f} nats"
        )
    run = next(iter(arms[0].values()))
    keys = run.spec.config
    training = run.result["tokens"] / run.result["tokens_per_second"]
    for name, tokens in (("drawn windows", keys.data.validation_tokens), ("whole split", None)):
        taken = seconds(run, tokens)
        print(
            f"one validation on {name}: {taken:.2f} s, {taken / training:.2%} of the {training:.0f} s of training steps"
        )
    points = len(run.loss_curve)
    print(f"the run has {points} validations on drawn windows and one on the whole split")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python benchmarks/paired_spread.py outputs/NAME TREATMENT BASELINE")
    main(*sys.argv[1:])
