"""For PYTHONPATH: every process pretends to train, as behaviour.json in the current folder says for each seed."""

import atexit
import json
import os
import signal
import subprocess
import sys
import time
import types
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

DEATHS = {"die": signal.SIGKILL, "stop": signal.SIGTERM, "fault": signal.SIGSEGV}


def note(file, text):
    with Path(file).open("a") as opened:
        opened.write(f"{text}\n")


def train(spec):
    seed = spec.config.seed
    behaviour = json.loads(Path("behaviour.json").read_text()).get(str(seed), "finish")
    print("this goes to console.log")
    note("started", json.dumps({"seed": seed, "pid": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"]}))
    end_badly(behaviour, seed)
    if behaviour == "hang":
        grandchild = subprocess.Popen(["sleep", "1000"])
        note("hanging", grandchild.pid)
        note("hanging", os.getpid())
        time.sleep(1000)
    finish(spec)


def end_badly(behaviour, seed):
    from simbal.errors import BusyError, UserError

    if behaviour == "crash":
        raise RuntimeError("the loss is nan")
    if behaviour == "refuse":
        raise UserError("no space left")
    if behaviour == "forestalled" and Path("started").read_text().count(f'"seed": {seed},') == 1:
        raise BusyError("another process was quicker, and has let go since")
    if behaviour == "starve":
        raise MemoryError("cannot allocate")
    if behaviour == "leave":
        raise SystemExit(0)
    if behaviour in DEATHS:
        os.kill(os.getpid(), DEATHS[behaviour])
        time.sleep(1000)


def loss(spec):
    """A loss with noise of about 0.03 nats, plus what behaviour.json adds for the balancing."""
    seed, balancing = spec.config.seed, spec.choices["balancing"]
    added = json.loads(Path("behaviour.json").read_text()).get(balancing, 0.0)
    return 2.0 + seed % 7 / 10 + (seed * 37 + len(balancing) * 11) % 13 / 130 + added


def finish(spec):
    from simbal.runs.folder import RunFolder

    folder, seed = RunFolder(spec.path), spec.config.seed
    with folder.lock():
        if folder.is_finished(spec):
            return
        folder.write_spec(spec)
        note("finished", seed)
        folder.write_record({
            "status": "finished", "config_hash": spec.hash, "choices": spec.choices, "seed": seed,
            "data": {"source": "synthetic", "text": "a", "tokens": "b", "versions": {}},
            "definitions": {"val/ppl": "exp of the loss"}, "steps": 1, "tokens": 2,
            "tokens_per_second": 3.0, "seconds": 100.0, "metrics": {"val/ppl": 10.0 + seed, "val/loss": loss(spec)},
        })  # fmt: skip


def prepare(config, progress):
    note("prepared", getattr(config, "chain_seed", config.source))
    tokens = json.loads(Path("behaviour.json").read_text()).get("tokens", "b")
    return types.SimpleNamespace(fingerprints={"tokens": tokens})


def pretend(name, **functions):
    """Put a module of that name in the place of ours, which would import torch."""
    module = types.ModuleType(name)
    vars(module).update(functions)
    sys.modules[name] = module


def note_modules():
    if Path(sys.argv[0]).name == "train.py":
        Path("modules").write_text(" ".join(sys.modules))


def customize_further():
    """What another sitecustomize of PYTHONPATH asks for, as this one has taken its place."""
    others = [place for place in sys.path if Path(place) != Path(__file__).parent]
    if found := PathFinder.find_spec("sitecustomize", others):
        found.loader.exec_module(module_from_spec(found))


pretend("simbal.training.run", train=train)
pretend("simbal.training.build", check_buildable=lambda spec, here: None)
pretend(
    "simbal.data.prepare",
    prepare=prepare,
    open_source=lambda data: types.SimpleNamespace(identity=lambda: None),
)
atexit.register(note_modules)
customize_further()
