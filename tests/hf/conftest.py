"""Small runs, each trained once."""

import pytest
from transformers.utils import logging

from simbal.analysis.trained import TrainedRun, load
from simbal.training.run import train
from tests.analysis.text_run import text_spec
from tests.conftest import spec_of

logging.disable_progress_bar()
SHORT = ("trainer.max_steps=2", "trainer.val_every=2")


@pytest.fixture(scope="session")
def run_of(tmp_path_factory, cache_dir):
    """`run_of("balancing=lbl")`: a finished run of two steps; the same overrides give the same run."""
    runs: dict[tuple[str, ...], TrainedRun] = {}

    def run(*overrides: str) -> TrainedRun:
        if overrides not in runs:
            spec = spec_of(tmp_path_factory.mktemp("runs"), cache_dir, *SHORT, *overrides)
            train(spec)
            runs[overrides] = load(spec.path, "cpu")
        return runs[overrides]

    return run


@pytest.fixture(scope="session")
def text_run(tmp_path_factory) -> TrainedRun:
    """A run with experts on text."""
    spec = text_spec(tmp_path_factory.mktemp("text"), "balancing=simbal", "model.init_std=0.2")
    train(spec)
    return load(spec.path, "cpu")
