"""Standard deviation over seeds of the paired difference of two arms, by validation set, and the cost of a validation.

python -m benchmarks.paired_spread outputs/NAME TREATMENT BASELINE, for example simbal and lbl: validates the trained
models on random windows, on the first tokens of each held-out document, and on all held-out tokens. Prints the mean and
standard deviation, in nats, of the loss difference over the seeds that both arms have, and the seconds per validation.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from simbal.analysis.quality import document_sums
from simbal.analysis.trained import load
from simbal.report.collect import Run, collect

DOCUMENT_TOKENS, SAMPLED_TOKENS = 2048, 12288  # from conf/data/pysource.yaml
MEASURED_ON = {  # first tokens per document, and number of sampled tokens
    f"a sample of {SAMPLED_TOKENS:,} of these tokens": (DOCUMENT_TOKENS, SAMPLED_TOKENS),
    f"the first {DOCUMENT_TOKENS:,} tokens of each document": (DOCUMENT_TOKENS, None),
    "all held-out tokens": (None, None),
}


def validated(run: Run) -> dict[str, tuple[float, float, int]]:
    """Return loss, CPU seconds and number of tokens by validation set."""
    trained, found = load(run.path, "cpu"), {}
    for name, (of_document, tokens) in MEASURED_ON.items():
        trained.validation = replace(trained.validation, document_tokens=of_document)
        started = time.process_time()
        nats, counted, _ = document_sums(trained, tokens, run.spec.config.trainer.micro_batch).sum(0).tolist()
        found[name] = (nats / counted, time.process_time() - started, int(counted))
    return found


def main(folder: str, treatment: str, baseline: str) -> None:
    """Print the spread and the cost."""
    finished = [run for run in collect(Path(folder)) if run.finished]
    ours, theirs = (
        {run.seed: validated(run) for run in finished if run.spec.choices["balancing"] == name}
        for name in (treatment, baseline)
    )
    pairs = sorted(ours.keys() & theirs.keys())
    for name in MEASURED_ON:
        differences = [ours[seed][name][0] - theirs[seed][name][0] for seed in pairs]
        _, seconds, tokens = ours[pairs[-1]][name]
        print(
            f"{name}: {len(pairs)} pairs, mean {fmean(differences):+.4f}, sd {stdev(differences):.4f} nats; "
            f"{tokens:,} tokens in {seconds:.1f} s"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
