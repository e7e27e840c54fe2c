"""Jobs that pretend to train: behaviour.json in the current folder sets the end and the metrics of each run."""

import json
import math
import os
import signal
import subprocess
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEATHS = {"die": signal.SIGKILL, "stop": signal.SIGTERM, "fault": signal.SIGSEGV}


def note(file, text):
    with Path(file).open("a") as opened:
        opened.write(f"{text}\n")


def behaviour():
    return json.loads(Path("behaviour.json").read_text())


def train(spec):
    from simbal.runs.folder import RunFolder

    how, seed, coef = behaviour(), spec.config.seed, coef_of(spec)
    print("this goes to console.log")
    threads = os.environ.get("OMP_NUM_THREADS")
    note("started", json.dumps({"seed": seed, "coef": coef, "pid": os.getpid(), "threads": threads}))
    ending = how.get(str(seed), "finish")
    if len(Path("started").read_text().splitlines()) > how.get("hang_after", math.inf):
        ending = "hang"
    end_badly(ending, seed)
    if ending == "hang":
        grandchild = subprocess.Popen(["sleep", "1000"])
        note("hanging", f"{grandchild.pid}\n{os.getpid()}")
        while behaviour() == how:
            time.sleep(0.05)
    folder = RunFolder(spec.path)
    with folder.lock():
        if folder.is_finished(spec):
            return
        folder.write_spec(spec)
        reason = curve(folder.path, ppl(spec), how) if coef > how.get("slow_above", math.inf) else None
        note("finished", seed)
        diverged = {"status": "diverged", "error": "the gradient was NaN", "step": 5} if ending == "diverge" else {}
        folder.write_record(record(spec, reason) | diverged)


def end_badly(ending, seed):
    from simbal.errors import BusyError, UserError

    if ending == "crash":
        raise RuntimeError("the loss is nan")
    if ending == "refuse":
        raise UserError("no space left")
    if ending == "locked once" and Path("started").read_text().count(f'"seed": {seed},') == 1:
        raise BusyError("another process held the lock")
    if ending == "starve":
        raise MemoryError("cannot allocate")
    if ending == "leave":
        raise SystemExit(0)
    if ending in DEATHS:
        os.kill(os.getpid(), DEATHS[ending])
        time.sleep(1000)


def record(spec, reason=None):
    how, seed = behaviour(), spec.config.seed
    metrics = {"val/ppl": ppl(spec), "val/loss": loss(spec), "val/min_pes": coef_of(spec), "val/max_vio": None}
    ended = {"status": "pruned", "error": reason} if reason else {"status": "finished"}
    return ended | {
        "config_hash": spec.hash, "choices": spec.choices, "seed": seed,
        "data": {"source": "synthetic", "text": "a", "tokens": how.get("tokens", "b"), "versions": {}},
        "definitions": {"val/ppl": "exp of the loss"}, "steps": 1, "tokens": 2,
        "tokens_per_second": 3.0, "seconds": 100.0, "metrics": metrics,
    }  # fmt: skip


def coef_of(spec):
    return next(iter(spec.config.balancing.values())).get("coef", 1.0)


def ppl(spec):
    """Worse the further the coefficient is from 1."""
    return 100 + abs(math.log10(coef_of(spec))) + spec.config.seed / 1000


def loss(spec):
    """Noise of about 0.03 nats, plus what behaviour.json adds for the balancing."""
    seed, balancing = spec.config.seed, spec.choices["balancing"]
    added = behaviour().get(balancing, 0.0)
    return 2.0 + seed % 7 / 10 + (seed * 37 + len(balancing) * 11) % 13 / 130 + added


def curve(path, value, how):
    """Write rows of metrics.jsonl until the run is pruned or has 40 rows; return why it was pruned."""
    rows = 10_000 if how.get("endless") and value > 101 else 40
    for step in range(0, 5 * rows, 5):
        if (path / "prune.json").exists():
            return json.loads((path / "prune.json").read_text())["reason"]
        note(path / "metrics.jsonl", json.dumps({"step": step, "tokens": step, "val/ppl": value}))
        time.sleep(0.02)
    return None


def prepare(config, progress):
    note("prepared", config.source)
    return types.SimpleNamespace(fingerprints={"tokens": behaviour().get("tokens", "b")})


REPLACED: dict[str, dict[str, Callable[..., Any]]] = {  # functions by module
    "simbal.training.run": {"train": train},
    "simbal.training.build": {"check_buildable": lambda spec, here: None},
    "simbal.data.prepare": {
        "prepare": prepare,
        "open_source": lambda data: types.SimpleNamespace(identity=lambda: None),
    },
}
