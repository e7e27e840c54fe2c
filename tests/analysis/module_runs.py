"""A small finished run that all tests of a file read."""

from hydra import compose, initialize_config_dir

from simbal.analysis.shared.trained import TrainedRun, load
from simbal.runs.spec import RunSpec
from simbal.training.run import train
from tests.conftest import CONF, MARKOV, SMALL


def trained_run(tmp_path_factory, cache_dir, *overrides: str) -> TrainedRun:
    places = (f"output_dir={tmp_path_factory.mktemp('outputs')}", f"data.cache_dir={cache_dir}")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [*SMALL, *MARKOV, *places, *overrides], return_hydra_config=True)
    spec = RunSpec.from_hydra(cfg)
    train(spec)
    return load(spec.path)


def dense_run(tmp_path_factory, cache_dir) -> TrainedRun:
    overrides = ("balancing=none", "model.num_experts=0", "trainer.max_steps=1")
    return trained_run(tmp_path_factory, cache_dir, *overrides)
