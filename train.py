"""Train one model, or with -m every model of a sweep, and write to outputs/<name>/ what came of it.

Examples:
    python train.py balancing=lbl seed=1 trainer.max_steps=100
    python train.py -m balancing=simbal,lbl seed=0-4      # ten runs and the table that compares them
"""

import os
from pathlib import Path

import hydra
from omegaconf import DictConfig

from simbal import command_line
from simbal.errors import exit_on_user_error
from simbal.run_spec import RunSpec
from simbal.sweep import tether


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    """Train the run that `cfg` describes."""
    with exit_on_user_error():
        spec = RunSpec.from_hydra(cfg)
        from simbal.training.run import train  # torch: 3 s that --help and a sweep's parent do not pay

        train(spec)


if __name__ == "__main__":
    # torch reads it when it is imported; its C++ side warns of a setting of DDP at every start, which is on purpose
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    tether.die_with_sweep()
    command_line.check(Path(__file__).with_name("conf"), __doc__)
    with command_line.exit_codes():
        main()
