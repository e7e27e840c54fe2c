"""Time and memory of the commands on a very large sweep: python -m benchmarks.large_sweep [arms] [seeds]

Trains one small run. Copies of its folder, with noise on the losses, represent all runs of a sweep: two strategies at
many learning rates, with the same seeds. Each command runs in a separate process; CPU seconds and peak resident memory
are printed. Temporary folders are in TMPDIR.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.composing import spec_of
from simbal.config.values import with_values
from simbal.runs.atomic import write_json
from simbal.runs.folder import RunFolder
from simbal.runs.record import digest
from simbal.runs.spec import RunSpec
from simbal.sweeping.composer import Job
from simbal.sweeping.plan import Attempt
from simbal.sweeping.view import draw

REPOSITORY = Path(__file__).parents[1]
SMALL = ("data=synthetic", "model.d_model=32", "model.num_heads=2", "model.d_expert=8", "logger=none")
STRATEGIES = ("lbl", "simbal")
DOCUMENTS = 82  # validation documents of data=pysource
STOP_AT_FIRST_JOB = """
import os, sys
from simbal.cli.train import train
from simbal.sweeping.plan import Attempt
Attempt.prepare_folder = lambda attempt: os._exit(0)
train(sys.argv[1:])
"""  # train.py, up to the start of its first job


def main(arms: int = 100, seeds: int = 100) -> None:
    """Print the cost of each command and the size of the page."""
    print(f"{arms * seeds:,} runs: {arms:,} arms of {seeds:,} seeds")
    with tempfile.TemporaryDirectory() as temporary:
        keys = [*SMALL, f"output_dir={temporary}/outputs", f"data.cache_dir={temporary}/data"]
        train(*keys, "name=template", "baseline=lbl")
        (template,) = Path(temporary, "outputs", "template").glob("*/")
        rates = [f"{(place + 1) * 1e-5:.6g}" for place in range(arms // len(STRATEGIES))]
        grid = (f"balancing={','.join(STRATEGIES)}", f"optim.lr={','.join(rates)}", f"seed=0-{seeds - 1}")
        command = ["-m", *keys, *grid]
        show("until the first job starts, no run finished", measured("-c", STOP_AT_FIRST_JOB, *command))
        runs = [*specs(keys, rates, seeds)]
        for spec in runs[1:]:
            write_run(spec, template)
        show("until the first job starts, all other runs finished", measured("-c", STOP_AT_FIRST_JOB, *command))
        sweep = Path(temporary, "outputs", "default")
        show_polls(runs)
        write_run(runs[0], template)
        del runs
        show("report.py", measured("report.py", str(sweep)))
        show("simbal runs", measured("-m", "simbal.cli.main", "runs", str(sweep)))
        print(f"index.html: {(sweep / 'index.html').stat().st_size / 1e6:.2f} MB")


def train(*arguments: str) -> None:
    """Train one run."""
    subprocess.run([sys.executable, "train.py", *arguments], check=True, capture_output=True, cwd=REPOSITORY)


def specs(keys: Sequence[str], rates: Sequence[str], seeds: int) -> Iterator[RunSpec]:
    """Yield the runs that the sweep's command composes."""
    for strategy in STRATEGIES:
        base = spec_of(*keys, f"balancing={strategy}")
        for rate in rates:
            for seed in range(seeds):
                config = with_values(base.written, {"optim.lr": float(rate), "seed": seed})
                yield RunSpec.from_resolved(config, base.choices)


def write_run(spec: RunSpec, template: Path) -> None:
    """Write a finished run: the template with different losses."""
    folder, noise = RunFolder(spec.path), random.Random(spec.hash)
    folder.write_spec(spec)
    shift = noise.gauss(0, 0.05)
    rows = [json.loads(line) for line in (template / "metrics.jsonl").read_text().splitlines()]
    curves = "".join(json.dumps(shifted(row, shift)) + "\n" for row in rows).encode()
    nats = [1000 * (5 + shift + noise.gauss(0, 0.01)) for _ in range(DOCUMENTS)]
    documents = json.dumps({"nats": nats, "tokens": [1000] * DOCUMENTS, "bytes": [3000] * DOCUMENTS}).encode()
    (folder.path / "metrics.jsonl").write_bytes(curves)
    (folder.path / "documents.json").write_bytes(documents)
    record = RunFolder(template).read_record()
    assert record
    identity = {"config_hash": spec.hash, "choices": spec.choices, "seed": spec.config.seed}
    digests = {"curves": digest(curves), "documents": digest(documents)}
    folder.write_record(record | identity | digests | {"metrics": shifted(record["metrics"], shift)})


def shifted(numbers: dict[str, Any], shift: float) -> dict[str, Any]:
    """Return a row of a curve, or a record's numbers, with different losses."""
    return numbers | {key: numbers[key] + shift for key in ("val/loss", "val/ppl", "train/ce") if key in numbers}


def show_polls(runs: Sequence[RunSpec]) -> None:
    """Print the time to draw the live view while the first run trains and all others are finished."""
    attempts = [Attempt(Job([], spec), spec.path.name, "done") for spec in runs]
    attempts[0].state = "running"
    RunFolder(runs[0].path).write_spec(runs[0])
    write_json(runs[0].path / "progress.json", {"phase": "train", "step": 10, "max_steps": 500})
    seconds = []
    for _ in range(5):
        before = time.process_time()
        draw(attempts, 2, 40)
        seconds.append(time.process_time() - before)
    print(f"live view: {seconds[0] * 1e3:.1f} ms at first, then {min(seconds[1:]) * 1e3:.1f} ms", flush=True)


def measured(*command: str) -> tuple[float, float]:
    """Return the CPU seconds and peak MB of a Python program."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, cwd=REPOSITORY, env=environment)
    _, status, used = os.wait4(program.pid, 0)
    if status:
        raise SystemExit(f"{command[:3]} failed with status {status}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1000


def show(what: str, cost: tuple[float, float]) -> None:
    """Print the CPU seconds and peak MB of one command."""
    print(f"{what}: {cost[0]:.1f} s, {cost[1]:.0f} MB", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
