"""Seconds that report.py takes for a folder of finished runs: python benchmarks/thousand_runs.py [runs]

Two strategies and 20 learning rates, on as many seeds as it takes; each with a config, a record and 60 rows of curves.
"""

import json
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from composing import spec_of

from simbal.config.check import checked
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec

REPOSITORY = Path(__file__).parents[1]
ARMS = [(balancing, 1e-4 * (i + 1)) for balancing in ("lbl", "simbal") for i in range(20)]
STEPS, TOKENS_PER_STEP = 500, 1024
DEFINITIONS = {"val/loss": "cross-entropy in nats", "val/ppl": "exp of val/loss", "val/max_vio": "max / mean - 1"}


def validation(loss: float) -> dict[str, Any]:
    """Return what a run writes of a validation: numbers of the model and of its four layers."""
    measured = {"val/loss": loss, "val/ppl": 2.0**loss, "val/bpb": loss / 2, "val/max_vio": loss / 8}
    return measured | {
        "val/seu": 0.98123456789,
        "val/entropy": 1.2312345678,
        "layers": {"seu": [0.1234567] * 4},
    }


def write_run(specs: dict[str, RunSpec], out: str, balancing: str, lr: float, seed: int) -> None:
    """Write one finished run."""
    base = specs[balancing]
    plain = {**base.written, "seed": seed, "output_dir": out, "optim": base.written["optim"] | {"lr": lr}}
    spec = RunSpec(checked(plain), base.choices, plain)
    folder = RunFolder(spec.path)
    folder.write_spec(spec)
    rows: list[dict[str, Any]] = []
    for step in range(0, STEPS + 1, 10):
        place = {"step": step, "tokens": step * TOKENS_PER_STEP}
        loss = 8 - 3 * step / STEPS + random.gauss(0, 0.01)
        rows.append(place | {"train/loss": loss, "train/ce": loss, "train/grad_norm": 1.2345678912345, "lr": lr})
        if step % 50 == 0:
            rows.append(place | validation(loss))
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[-60:]))
    metrics = {key: value for key, value in rows[-1].items() if isinstance(value, float)}
    folder.write_record({
        "status": "finished", "config_hash": spec.hash, "choices": spec.choices, "seed": seed,
        "data": {"text": "a", "tokens": "b", "versions": {}}, "definitions": DEFINITIONS,
        "steps": STEPS, "tokens": STEPS * TOKENS_PER_STEP, "tokens_per_second": 9000.0, "metrics": metrics,
    })  # fmt: skip


with tempfile.TemporaryDirectory() as out:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    specs = {balancing: spec_of(f"balancing={balancing}") for balancing in ("lbl", "simbal")}
    for i in range(number):
        write_run(specs, out, *ARMS[i % len(ARMS)], seed=i // len(ARMS))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *sys.argv[2:], REPOSITORY / "report.py", Path(out, "default")]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{number} runs: {seconds:.2f} s of process time, {len(shown.splitlines())} lines of table")
