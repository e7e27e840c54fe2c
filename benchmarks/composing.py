"""Compose the runs that benchmarks measure, as train.py does."""

from hydra import compose, initialize_config_dir

from simbal.config.options import CONF
from simbal.runs.spec import RunSpec


def spec_of(*overrides: str) -> RunSpec:
    """Return the run of `python train.py` with these overrides."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return RunSpec.from_hydra(compose("config", [*overrides], return_hydra_config=True))
