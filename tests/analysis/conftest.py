"""Small finished runs for several tests."""

from collections.abc import Callable
from functools import cache

import pytest

from simbal.analysis.trained import TrainedRun, load
from simbal.runs.spec import RunSpec
from simbal.training.run import train
from tests.analysis.text_run import text_spec
from tests.conftest import spec_of


@pytest.fixture(scope="session")
def trained(tmp_path_factory, cache_dir) -> Callable[..., TrainedRun]:
    """`trained("balancing=lbl")`: a run of four steps, trained once per session. To modify it, load it again."""

    @cache
    def run(*overrides: str) -> TrainedRun:
        spec = spec_of(tmp_path_factory.mktemp("outputs"), cache_dir, "trainer.max_steps=4", *overrides)
        train(spec)
        return load(spec.path)

    return run


@pytest.fixture(scope="session")
def text_run(tmp_path_factory) -> RunSpec:
    """A finished run on text, trained once per session; its corpus.txt and its cache are in the same folder."""
    spec = text_spec(tmp_path_factory.mktemp("text"), "balancing=lf_lbl", "trainer.max_steps=4")
    train(spec)
    return spec
