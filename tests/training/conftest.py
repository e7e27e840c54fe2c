"""Runs for several tests, trained once per session."""

import pytest

from simbal.runs.spec import RunSpec
from simbal.training.run import train


@pytest.fixture(scope="session")
def finished_runs() -> dict[frozenset[str], RunSpec]:
    return {}


@pytest.fixture
def finished(small_spec, finished_runs, tmp_path_factory):
    """`finished("balancing=lbl")`: a finished run, which tests may only read."""

    def once(*overrides: str) -> RunSpec:
        keys = frozenset(overrides)
        if keys not in finished_runs:
            spec = small_spec(*overrides, output_dir=tmp_path_factory.mktemp("finished"))
            train(spec)
            finished_runs[keys] = spec
        return finished_runs[keys]

    return once
