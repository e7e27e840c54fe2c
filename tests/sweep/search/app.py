"""train.py in processes whose runs have a value at once: made of their coefficient and seed."""

import json
import subprocess
from pathlib import Path
from typing import Any

import optuna

from tests.child_processes import alive, wait_until
from tests.programs import Program

COEF = "balancing.simbal.coef=tag(log,interval(1e-3,10))"

PRETENDING = str(Path(__file__).with_name("pretending"))  # for PYTHONPATH


class SearchApp:
    """train.py in a folder of its own, on `data=synthetic`, where nothing is trained."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.behave()

    def behave(self, **how: Any) -> None:
        """What runs do: crash_seed, hang_after (so many jobs), nan; and by their coefficient crash_above, slow_above,
        endless_above and lacks_above (the objective).
        """
        (self.folder / "behaviour.json").write_text(json.dumps(how))

    def start(self, *arguments: str, **environment: str) -> Program:
        fixed = ("-m", "hydra/sweeper=optuna", "data=synthetic", "hydra.launcher.preload=[]")
        environment["PYTHONPATH"] = PRETENDING
        return Program("train.py", *fixed, *arguments, cwd=self.folder, **environment)

    def run(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return self.start(*arguments, **environment).completed()

    def kill(self, process: Program, jobs: int) -> None:
        """kill -9 the search once so many jobs have started, and wait until they are gone."""
        self.wait_until(lambda: len(self.started) >= jobs)
        process.kill()
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
