"""Test the paper's claims again: train every study of a scale, analyse it, and write the evidence to results/.

Examples:
    python reproduce.py scale=cpu                         # hours; the same command goes on where it was stopped
    python reproduce.py scale=cpu only=[significance]
    python reproduce.py scale=cpu figures=true            # draw the figures in results/ again
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from simbal import command_line
from simbal.config import resolved
from simbal.errors import exit_on_user_error
from simbal.reproduce.reproduce import reproduce


@hydra.main(version_base="1.3", config_path="conf", config_name="reproduce")
def main(cfg: DictConfig) -> None:
    """Do the studies that `cfg` names."""
    with exit_on_user_error():
        reproduce(resolved(cfg), Path(__file__).parent)


if __name__ == "__main__":
    command_line.check(Path(__file__).with_name("conf"), __doc__, root="reproduce")
    with command_line.exit_codes():
        main()
