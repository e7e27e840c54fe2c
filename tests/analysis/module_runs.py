"""A small finished run that all tests of a file read."""

from simbal.analysis.trained import TrainedRun, load
from simbal.training.run import train
from tests.conftest import spec_of


def trained_run(tmp_path_factory, cache_dir, *overrides: str) -> TrainedRun:
    spec = spec_of(tmp_path_factory.mktemp("outputs"), cache_dir, *overrides)
    train(spec)
    return load(spec.path)
