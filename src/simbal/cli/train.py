"""Train one model, or with -m every model of a sweep, and save results to outputs/<name>/.

Examples:
    python train.py balancing=lbl seed=1 trainer.max_steps=300
    python train.py -m balancing=simbal,lbl seed=0-4      # ten runs and the table that compares them
    python train.py run=outputs/default/RUN               # resume a run
    python train.py from=outputs/default/RUN seed=7       # start a new one with its config and one change
"""

import os
from typing import TYPE_CHECKING, Any

from simbal.cli.command_line import run
from simbal.errors import ConfigError, exit_on_user_error

if TYPE_CHECKING:
    from simbal.runs.spec import RunSpec


def main(argv: list[str]) -> None:
    """Train what a command line describes."""
    # torch reads it when it is imported; its C++ side warns of a setting of DDP at every start, which is on purpose
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    run(train_composed, __doc__, argv, again=train_run)


def train_composed(cfg: Any) -> None:
    """Train the run that `cfg` describes."""
    with exit_on_user_error():
        from simbal.runs.spec import RunSpec

        spec = RunSpec.from_hydra(cfg)
        if spec.config.dry_run or spec.config.until == "decided":
            raise ConfigError("dry_run=true and until=decided are for sweeps: add -m")
        train_run(spec)


def train_run(spec: "RunSpec") -> None:
    """Train it, or go on with it."""
    with exit_on_user_error():
        from simbal.training.run import train  # torch: 3 s that --help and a sweep's parent do not pay

        train(spec)
