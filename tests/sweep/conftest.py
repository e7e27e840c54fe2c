"""train.py with jobs that only pretend to train."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
import pytest

from simbal import processes
from simbal.runs.folder import RunFolder
from tests import in_process, programs
from tests.child_processes import alive, wait_until
from tests.composing import cheap_hydra
from tests.sweep import pretend

PRETENDING = str(Path(__file__).with_name("pretending"))  # for PYTHONPATH
OUR_PATH = os.environ.get("PYTHONPATH", "")


class App:
    """train.py in its own folder, on `data=synthetic` by default, where nothing is trained."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[programs.Program]()
        self.behave()

    def behave(self, by_seed: dict[int, str] | None = None, **how: Any) -> None:
        """Set how runs end by seed, `tokens`, additions to losses by balancing, and limits (see `pretend.train`)."""
        new = self.folder / "behaviour.json.new"
        new.write_text(json.dumps({**(by_seed or {}), **how}))
        new.replace(self.folder / "behaviour.json")  # a job may be reading the file

    def run(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run train.py in this process. Jobs are forks of it, and no page is written."""
        with contextlib.ExitStack() as patched:
            for module, functions in pretend.REPLACED.items():
                for name, function in functions.items():
                    patched.enter_context(mock.patch(f"{module}.{name}", function))
            patched.enter_context(mock.patch.object(processes, "ForkServer", programs.ForkHere))
            patched.enter_context(mock.patch("simbal.report.page.write"))
            patched.enter_context(mock.patch("simbal.sweeping.pool.POLL_SECONDS", 0.01))
            patched.enter_context(cheap_hydra(arguments))
            environment = {"CUDA_VISIBLE_DEVICES": "", **environment}
            return in_process.run(self.folder, "train.py", *self._arguments(arguments), environment=environment)

    def start(self, *arguments: str, **environment: str) -> programs.Program:
        """Start train.py as a separate process."""
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (PRETENDING, environment.get("PYTHONPATH"), OUR_PATH)))
        self.processes.append(programs.Program("train.py", *self._arguments(arguments), cwd=self.folder, **environment))
        return self.processes[-1]

    def _arguments(self, arguments: tuple[str, ...]) -> list[str]:
        keys = {argument.partition("=")[0] for argument in arguments}
        ours = "-m" in arguments and not keys & {"hydra/launcher", "hydra.launcher.preload"}
        preload = ["hydra.launcher.preload=[]"] if ours else []
        return [*arguments, *preload, *(["data=synthetic"] if "data" not in keys else [])]

    def lines(self, file: str) -> list[str]:
        path = self.folder / file
        return path.read_text().splitlines() if path.exists() else []

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """Every job that was started, in order."""
        return [json.loads(line) for line in self.lines("started")]

    @property
    def started(self) -> list[int]:
        """The seed of each job that was started, sorted."""
        return sorted(job["seed"] for job in self.jobs)

    @property
    def hanging(self) -> list[int]:
        """The process ids of jobs that hang, and of their children."""
        return [int(pid) for pid in self.lines("hanging")]

    def run_folder(self, seed: int, name: str = "default") -> Path:
        (path,) = (self.folder / "outputs" / name).glob(f"*seed{seed}-*")
        return path

    def record(self, seed: int) -> dict[str, Any]:
        record = RunFolder(self.run_folder(seed)).read_record()
        assert record is not None
        return record

    def table(self, name: str = "default") -> Any:
        return json.loads((self.folder / "outputs" / name / "table.json").read_text())

    def study(self, name: str = "s") -> optuna.Study:
        storage = f"sqlite:///{self.folder}/outputs/{name.partition('/')[0]}/study.db"
        return optuna.load_study(study_name=name, storage=storage)

    alive, wait_until = staticmethod(alive), staticmethod(wait_until)


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    app = App(tmp_path)
    yield app
    for process in app.processes:
        process.kill()
    for pid in app.hanging:  # only if the test failed to see them end
        if app.alive(pid):
            os.kill(pid, signal.SIGKILL)
