"""The subcommand `train`."""

import os
from typing import TYPE_CHECKING, Any

from simbal.cli.command_line import run
from simbal.errors import ConfigError

if TYPE_CHECKING:
    from simbal.runs.spec import RunSpec


def train(argv: list[str]) -> None:
    """Train one model, or with -m every model of a sweep, and save results to outputs/<name>/.

    Examples:
        python train.py balancing=lbl seed=1 trainer.max_steps=300
        python train.py -m balancing=simbal,lbl seed=0-4      # ten runs and the table that compares them
        python train.py run=outputs/default/RUN               # resume a run
        python train.py from=outputs/default/RUN seed=7       # start a new run with its config and one change
    """
    # silences a warning about DDP at every start; torch reads the variable when it is imported
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    run(train_composed, train.__doc__, argv, resume=train_run)


def train_composed(cfg: Any) -> None:
    """Train the run of a config that Hydra composed."""
    from simbal.report.arms import with_folders
    from simbal.runs.spec import RunSpec

    spec = RunSpec.from_hydra(cfg)
    if spec.config.dry_run or spec.config.until == "decided":
        raise ConfigError("dry_run=true and until=decided are for sweeps: add -m")
    train_run(*with_folders([spec]))


def train_run(spec: "RunSpec") -> None:
    """Train a run or resume it."""
    from simbal.training.run import train  # imports torch, which takes 3 s

    train(spec)
