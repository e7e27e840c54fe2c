"""A program that searches as train.py does, whose runs have a value at once: made of their coefficient and seed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna

from tests.child_processes import PATIENCE_SECONDS, alive, hear_ctrl_c, wait_until

REPOSITORY = Path(__file__).parents[2]
COEF = "balancing.simbal.coef=tag(log,interval(1e-3,10))"

PROGRAM = f"""
import json, math, os, signal, sys, time, types
from pathlib import Path

import hydra

from simbal import command_line
from simbal.errors import exit_on_user_error
from simbal.run_folder import RunFolder
from simbal.run_spec import RunSpec
from simbal.sweep import tether


def note(file, text):
    with open(file, "a") as opened:
        opened.write(text + "\\n")


def curve(folder, value):
    for step in range(0, 1000, 5):
        if (folder.path / "prune.json").exists():
            return json.loads((folder.path / "prune.json").read_text())["reason"]
        note(folder.path / "metrics.jsonl", json.dumps({{"step": step, "tokens": step, "val/ppl": value}}))
        time.sleep(0.05)


def train(spec):
    behaviour = json.loads(Path("behaviour.json").read_text())
    folder, seed = RunFolder(spec.path), spec.config["seed"]
    coef = spec.config["balancing"][spec.choices["balancing"]].get("coef", 1.0)
    value = 100 + abs(math.log10(coef)) + seed / 1000
    note("started", json.dumps({{"seed": seed, "coef": coef, "path": str(spec.path), "pid": os.getpid()}}))
    if behaviour.get("crash_seed") == seed or behaviour.get("crash_above", math.inf) < coef:
        raise RuntimeError("the loss is nan")
    if behaviour.get("hang_after", math.inf) < len(Path("started").read_text().splitlines()):
        time.sleep(1000)
    if behaviour.get("nan"):
        value = math.nan
    reason = curve(folder, value) if coef > behaviour.get("slow_above", math.inf) else None
    record = {{
        "status": "finished", "config_hash": spec.hash, "choices": spec.choices, "seed": seed,
        "data": {{"source": "synthetic", "text": "a", "tokens": "b", "versions": {{}}}},
        "definitions": {{"val/ppl": "exp of the loss"}}, "steps": 1, "tokens": 2, "tokens_per_second": 3.0,
        "metrics": {{"val/ppl": value, "pes/min": coef, "load/max_vio": None}},
    }}
    if reason:
        record |= {{"status": "pruned", "error": reason}}
    with folder.lock():
        (folder.path / "record.json").write_text(json.dumps(record))


def prepare(config, progress):
    return types.SimpleNamespace(fingerprints={{"tokens": "b"}})


@hydra.main(version_base="1.3", config_path={str(REPOSITORY / "conf")!r}, config_name="config")
def main(cfg):
    with exit_on_user_error():
        train(RunSpec.from_hydra(cfg))


if __name__ == "__main__":
    tether.die_with_sweep()
    store = types.ModuleType("simbal.data.store")
    store.prepare = prepare
    sys.modules["simbal.data.store"] = store
    command_line.check(Path({str(REPOSITORY / "conf")!r}), "A program that trains nothing.")
    with command_line.exit_codes():
        main()
"""


class SearchApp:
    """The program in a folder of its own, on `data=synthetic`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(PROGRAM)
        self.behave()

    def behave(self, **how: Any) -> None:
        """crash_seed, crash_above, slow_above (a coefficient), hang_after (so many jobs), nan."""
        (self.folder / "behaviour.json").write_text(json.dumps(how))

    def start(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        fixed = ("-m", "hydra/sweeper=optuna", "data=synthetic", "hydra.launcher.preload=[]")
        command = [sys.executable, "train.py", *fixed, *arguments]
        output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(
            command, cwd=self.folder, env={**os.environ, **environment}, preexec_fn=hear_ctrl_c, **output
        )

    def run(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def kill(self, process: "subprocess.Popen[str]", jobs: int) -> None:
        """kill -9 the search once so many jobs have started, and wait until they are gone."""
        self.wait_until(lambda: len(self.started) >= jobs)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        self.wait_until(lambda: not any(self.alive(job["pid"]) for job in self.started))

    @property
    def started(self) -> list[dict[str, Any]]:
        """Every job that was started, in order."""
        file = self.folder / "started"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def study(self, name: str = "s", storage: Any = None) -> optuna.Study:
        return optuna.load_study(
            study_name=name, storage=storage or f"sqlite:///{self.folder}/outputs/{name.partition('/')[0]}/study.db"
        )

    alive, wait_until = staticmethod(alive), staticmethod(wait_until)
