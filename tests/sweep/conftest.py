"""A program that sweeps as train.py does but trains nothing, and run folders without a run."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simbal.run_folder import RunFolder
from tests.child_processes import PATIENCE_SECONDS, alive, hear_ctrl_c, wait_until

REPOSITORY = Path(__file__).parents[2]

PROGRAM = f"""
import atexit, json, os, signal, subprocess, sys, time, types
from pathlib import Path

import hydra

from simbal import command_line
from simbal.errors import UserError, exit_on_user_error
from simbal.run_folder import RunFolder
from simbal.run_spec import RunSpec
from simbal.sweep import tether


DEATHS = {{"die": signal.SIGKILL, "stop": signal.SIGTERM, "fault": signal.SIGSEGV}}


def note(file, text):
    with open(file, "a") as opened:
        opened.write(text + "\\n")


def train(spec):
    folder, seed = RunFolder(spec.path), spec.config["seed"]
    behaviour = json.loads(Path("behaviour.json").read_text()).get(str(seed), "finish")
    print("this goes to console.log")
    note("started", json.dumps({{"seed": seed, "pid": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"]}}))
    if behaviour == "crash":
        raise RuntimeError("the loss is nan")
    if behaviour == "refuse":
        raise UserError("no space left")
    if behaviour == "starve":
        raise MemoryError("cannot allocate")
    if behaviour == "leave":
        raise SystemExit(0)
    if behaviour in DEATHS:
        os.kill(os.getpid(), DEATHS[behaviour])
        time.sleep(1000)
    if behaviour == "hang":
        grandchild = subprocess.Popen(["sleep", "1000"])
        note("hanging", str(grandchild.pid))
        note("hanging", str(os.getpid()))
        time.sleep(1000)
    with folder.lock():
        if folder.finished(spec):
            return
        note("finished", str(seed))
        folder.write_record({{
            "status": "finished", "config_hash": spec.hash, "choices": spec.choices, "seed": seed,
            "data": {{"source": "synthetic", "text": "a", "tokens": "b", "versions": {{}}}},
            "definitions": {{"val/ppl": "exp of the loss"}}, "steps": 1, "tokens": 2,
            "tokens_per_second": 3.0, "seconds": 100.0,
            "metrics": {{"val/ppl": 10.0 + seed}},
        }})


def prepare(config, progress):
    note("prepared", str(config["seed"]))
    tokens = json.loads(Path("behaviour.json").read_text()).get("tokens", "b")
    return types.SimpleNamespace(fingerprints={{"tokens": tokens}})


@hydra.main(version_base="1.3", config_path={str(REPOSITORY / "conf")!r}, config_name="config")
def main(cfg):
    with exit_on_user_error():
        train(RunSpec.from_hydra(cfg))


if __name__ == "__main__":
    tether.die_with_sweep()
    store = types.ModuleType("simbal.data.store")
    store.prepare = prepare
    sys.modules["simbal.data.store"] = store
    atexit.register(lambda: Path("modules").write_text(" ".join(sys.modules)))
    command_line.check(Path({str(REPOSITORY / "conf")!r}), "A program that trains nothing.")
    with command_line.exit_codes():
        main()
"""


class App:
    """The program in a folder of its own, on `data=synthetic`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(PROGRAM)
        self.behave({})

    def behave(self, by_seed: dict[int, str], tokens: str = "b") -> None:
        """finish (the default), crash, starve, leave, refuse, die, stop, fault, hang; the fingerprint of the data."""
        (self.folder / "behaviour.json").write_text(json.dumps({**by_seed, "tokens": tokens}))

    def start(self, *arguments: str, preload: str = "[]") -> "subprocess.Popen[str]":
        """Its sweeps fork their jobs, from a server that does not spend 3 s on importing torch."""
        ours = "-m" in arguments and not any(argument.startswith("hydra/launcher=") for argument in arguments)
        forked = [f"hydra.launcher.preload={preload}"] if ours else []
        command = [sys.executable, "train.py", *arguments, *forked, "data=synthetic"]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.folder, preexec_fn=hear_ctrl_c, **output)  # type: ignore[call-overload, no-any-return]

    def run(self, *arguments: str, preload: str = "[]") -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments, preload=preload)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def lines(self, file: str) -> list[str]:
        path = self.folder / file
        return path.read_text().splitlines() if path.exists() else []

    @property
    def started(self) -> list[int]:
        """The seed of each job that was started, in order of seeds."""
        return sorted(json.loads(line)["seed"] for line in self.lines("started"))

    def run_folder(self, seed: int, name: str = "default") -> Path:
        (path,) = (self.folder / "outputs" / name).glob(f"*seed{seed}-*")
        return path

    def record(self, seed: int) -> dict[str, Any]:
        record = RunFolder(self.run_folder(seed)).read_record()
        assert record is not None
        return record

    alive, wait_until = staticmethod(alive), staticmethod(wait_until)


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    app = App(tmp_path)
    yield app
    for pid in app.lines("hanging"):  # only if the test failed to see them end
        if app.alive(int(pid)):
            os.kill(int(pid), signal.SIGKILL)
