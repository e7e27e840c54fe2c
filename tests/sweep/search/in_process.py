"""A search without Hydra and processes: the launcher writes the records of runs immediately."""

import io
import json
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
from simbal.sweeping.composer import Job
from simbal.sweeping.search.search import run_searches
from simbal.sweeping.search.space import SearchSettings, build_space
from tests.conftest import composer
from tests.sweep import pretend

COEF = "balancing.simbal.coef"
SPACE = (f"{COEF}=tag(log,interval(1e-3,10))",)


class Records:
    """A launcher whose runs are finished at once, unless `crash` says otherwise."""

    def __init__(self) -> None:
        self.launched: list[Path] = []
        self.crash = lambda seed, coef: False

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[Any]:
        for job in job_overrides:
            assert isinstance(job, Job)
            folder, record = RunFolder(job.spec.path), pretend.record(job.spec)
            self.launched.append(folder.path)
            if folder.is_finished(job.spec):
                continue
            folder.write_spec(job.spec)
            if self.crash(job.spec.config.seed, pretend.coef_of(job.spec)):
                record |= {"status": "failed", "error": "RuntimeError: the loss is nan"}
            folder.write_record(record)
        return []


class SearchHere:
    """Searches with the name `s` in `folder`, which is the working folder. No table is printed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.launcher = folder, Records()
        (folder / "behaviour.json").write_text(json.dumps({}))

    def run(self, *lines: str, space: Sequence[str] = SPACE, **settings: Any) -> str:
        """Search and return the output; `settings` are keys of hydra.sweeper."""
        given = SearchSettings(**{"n_trials": 3, "n_jobs": 1, "sampler": "random"} | settings)
        given.check()
        named = [] if any(line.startswith("name=") for line in lines) else ["name=s"]
        parsed = spans.parse(["data=synthetic", *space, *named, *lines], integer_keys(), OverridesParser.create())
        spaces = {"": build_space(parsed, given.replicates, integer_keys())}
        out = io.StringIO()
        console = Console(file=out, width=200, markup=False, highlight=False)
        with (
            mock.patch("simbal.data.prepare.prepare", return_value=mock.Mock(fingerprints={"tokens": "b"})),
            mock.patch("simbal.sweeping.search.search.report"),
        ):
            run_searches(spaces, given, composer().job, self.launcher, console)
        return out.getvalue()

    def trials(self, *states: Any, storage: Any = None) -> list[Any]:
        """Return the trials of the study in `states`, or all."""
        storage = storage or f"sqlite:///{self.folder}/outputs/s/study.db"
        return optuna.load_study(study_name="s", storage=storage).get_trials(states=states or None)
