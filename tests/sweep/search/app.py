"""train.py in processes whose runs have a value at once: made of their coefficient and seed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna

from tests.child_processes import DEADLINE_SECONDS, alive, hear_ctrl_c, wait_until

REPOSITORY = Path(__file__).parents[3]
COEF = "balancing.simbal.coef=tag(log,interval(1e-3,10))"

PRETENDING = str(Path(__file__).with_name("pretending"))  # for PYTHONPATH


class SearchApp:
    """train.py in a folder of its own, on `data=synthetic`, where nothing is trained."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.behave()

    def behave(self, **how: Any) -> None:
        """crash_seed, crash_above, slow_above (a coefficient), hang_after (so many jobs), nan."""
        (self.folder / "behaviour.json").write_text(json.dumps(how))

    def start(self, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        fixed = ("-m", "hydra/sweeper=optuna", "data=synthetic", "hydra.launcher.preload=[]")
        command = [sys.executable, str(REPOSITORY / "train.py"), *fixed, *arguments]
        output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, **environment, "PYTHONPATH": PRETENDING},
            preexec_fn=hear_ctrl_c,
            **output,
        )

    def run(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=DEADLINE_SECONDS)
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
