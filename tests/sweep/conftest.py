"""train.py in processes that only pretend to train, and run folders without a run."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simbal.runs.folder import RunFolder
from tests.child_processes import alive, wait_until
from tests.programs import Program

BOTH_STARTS = pytest.mark.parametrize("preload", ["[]", pytest.param("null", marks=pytest.mark.slow)])
PRETENDING = str(Path(__file__).with_name("pretending"))  # for PYTHONPATH


class App:
    """train.py in a folder of its own, on `data=synthetic` unless told otherwise, where nothing is trained."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[Program]()
        self.behave({})

    def behave(self, by_seed: dict[int, str], tokens: str = "b", **added: float) -> None:
        """finish (the default), crash, starve, leave, refuse, die, stop, fault, hang, forestalled (the first time).

        `tokens`: the fingerprint of the data; `added`: to the loss of a balancing.
        """
        (self.folder / "behaviour.json").write_text(json.dumps({**by_seed, "tokens": tokens, **added}))

    def start(self, *arguments: str, preload: str = "[]", **environment: str) -> Program:
        """A process of it; with `preload=null` the jobs of its sweeps are new Pythons, else forks."""
        ours = "-m" in arguments and not any(argument.startswith("hydra/launcher=") for argument in arguments)
        how = [f"hydra.launcher.preload={preload}"] if ours else []
        data = [] if any(argument.startswith("data=") for argument in arguments) else ["data=synthetic"]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (PRETENDING, environment.get("PYTHONPATH"))))
        self.processes.append(Program("train.py", *arguments, *how, *data, cwd=self.folder, **environment))
        return self.processes[-1]

    def run(self, *arguments: str, preload: str = "[]", **environment: str) -> "subprocess.CompletedProcess[str]":
        return self.start(*arguments, preload=preload, **environment).completed()

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
    for process in app.processes:
        process.kill()
    for pid in app.lines("hanging"):  # only if the test failed to see them end
        if app.alive(int(pid)):
            os.kill(int(pid), signal.SIGKILL)
