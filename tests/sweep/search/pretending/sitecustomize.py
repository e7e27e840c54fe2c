"""For PYTHONPATH: every process pretends to train, with a value that is made of its coefficient and seed."""

import json
import math
import os
import sys
import time
import types
from pathlib import Path


def note(file, text):
    with Path(file).open("a") as opened:
        opened.write(f"{text}\n")


def train(spec):
    from simbal.runs.folder import RunFolder

    behaviour = json.loads(Path("behaviour.json").read_text())
    folder, seed = RunFolder(spec.path), spec.config.seed
    coef = spec.config.balancing[spec.choices["balancing"]].get("coef", 1.0)
    value = 100 + abs(math.log10(coef)) + seed / 1000
    note("started", json.dumps({"seed": seed, "coef": coef, "path": str(spec.path), "pid": os.getpid()}))
    if behaviour.get("crash_seed") == seed or behaviour.get("crash_above", math.inf) < coef:
        raise RuntimeError("the loss is nan")
    if behaviour.get("hang_after", math.inf) < len(Path("started").read_text().splitlines()):
        time.sleep(1000)
    value = math.nan if behaviour.get("nan") else value
    rows = 10_000 if coef > behaviour.get("endless_above", math.inf) else 40
    reason = curve(folder, value, rows) if coef > behaviour.get("slow_above", math.inf) else None
    record = {
        "status": "finished", "config_hash": spec.hash, "choices": spec.choices, "seed": seed,
        "data": {"source": "synthetic", "text": "a", "tokens": "b", "versions": {}},
        "definitions": {"val/ppl": "exp of the loss"}, "steps": 1, "tokens": 2, "tokens_per_second": 3.0,
        "metrics": {"val/ppl": value, "val/min_pes": coef, "val/max_vio": None},
    }  # fmt: skip
    if coef > behaviour.get("lacks_above", math.inf):
        del record["metrics"]["val/ppl"]
    if reason:
        record |= {"status": "pruned", "error": reason}
    with folder.lock():
        if behaviour.get("nan"):
            (folder.path / "record.json").write_text(json.dumps(record))
        else:
            folder.write_record(record)


def curve(folder, value, rows):
    """Rows of metrics.jsonl, one after the other; why it was pruned, if it was."""
    for step in range(0, 5 * rows, 5):
        if (folder.path / "prune.json").exists():
            return json.loads((folder.path / "prune.json").read_text())["reason"]
        note(folder.path / "metrics.jsonl", json.dumps({"step": step, "tokens": step, "val/ppl": value}))
        time.sleep(0.05)
    return None


def prepare(config, progress):
    return types.SimpleNamespace(fingerprints={"tokens": "b"})


def pretend(name, **functions):
    """Put a module of that name in the place of ours, which would import torch."""
    module = types.ModuleType(name)
    vars(module).update(functions)
    sys.modules[name] = module


pretend("simbal.training.run", train=train)
pretend("simbal.training.build", check_buildable=lambda spec, here: None)
pretend(
    "simbal.data.prepare",
    prepare=prepare,
    open_source=lambda data: types.SimpleNamespace(identity=lambda: None),
)
