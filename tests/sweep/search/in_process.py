"""A search within the test's own process, whose launcher writes the records of its runs at once."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console

from simbal.config import spans
from simbal.config.schema import integer_keys
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec
from simbal.sweep.composer import Job
from simbal.sweep.search import space
from simbal.sweep.search.run import run_searches
from simbal.sweep.search.settings import SearchSettings
from tests.conftest import composer

KEY = "balancing.simbal.coef"
LINES = ("data=synthetic", f"{KEY}=tag(log,interval(1e-3,10))", "seed=0-1")


class Records:
    """A launcher whose runs are finished at once, unless they are to fail or to be left unfinished."""

    def __init__(self) -> None:
        self.launched: list[Path] = []
        self.statuses: dict[int, str | None] = {}  # of the n-th job; None: it leaves no record

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[Any]:
        for job in job_overrides:
            assert isinstance(job, Job)
            folder, number = RunFolder(job.spec.path), len(self.launched)
            self.launched.append(folder.path)
            if folder.finished(job.spec):
                continue
            folder.write_spec(job.spec)
            status = self.statuses.get(number, "finished")
            if status:
                folder.write_record(record(job.spec, status, number))
        return []


def record(spec: RunSpec, status: str, number: int) -> dict[str, Any]:
    value = 100 + abs(math.log10(spec.config.balancing["simbal"]["coef"])) + spec.config.seed / 1000
    minutes, seconds = divmod(number, 60)
    written: dict[str, Any] = {
        "status": status, "config_hash": spec.hash, "choices": spec.choices, "seed": spec.config.seed,
        "data": {"source": "synthetic", "text": "a", "tokens": "b", "versions": {}}, "steps": 1, "tokens": 2,
        "definitions": {"val/ppl": "exp of the loss"}, "tokens_per_second": 3.0,
        "metrics": {"val/ppl": value, "val/max_vio": None},
        "started": f"2026-01-01T00:{minutes:02}:{seconds:02}+00:00", "ended": "2026-01-01T02:00:00+00:00",
    }  # fmt: skip
    return written if status == "finished" else written | {"error": "RuntimeError: the loss is nan"}


class SearchHere:
    """Searches in `folder`, which is the working folder, by the name `s`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.launcher, self.lines = folder, Records(), list(LINES)

    def run(self, *lines: str, **settings: Any) -> str:
        """What it prints; `hydra.sweeper.<key>` are given as keywords."""
        given = SearchSettings(**{"n_trials": 3, "n_jobs": 1, "sampler": "random"} | settings)
        given.check()
        named = [] if any(line.startswith("name=") for line in lines) else ["name=s"]
        overrides = spans.parse([*self.lines, *named, *lines], integer_keys(), OverridesParser.create())
        searched = space.build(overrides, "seed", integer_keys(), grid=given.sampler == "grid")
        out = io.StringIO()
        console = Console(file=out, width=200, markup=False, highlight=False)
        with mock.patch("simbal.data.store.prepare", return_value=mock.Mock(fingerprints={"tokens": "b"})):
            run_searches({"": searched}, given, composer().job, self.launcher, console)
        return out.getvalue()

    def study(self, storage: Any) -> optuna.Study:
        return optuna.load_study(study_name="s", storage=storage)
