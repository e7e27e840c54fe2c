"""Turn text into tokens on disk, which train.py would else do when it starts.

Examples:
    python prepare.py
    python prepare.py data=files data.files='books/*.jsonl.zst' data.vocab_size=32768
    python prepare.py check=true                # is what was prepared still whole?
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from simbal import command_line
from simbal.config import resolved
from simbal.errors import exit_on_user_error


@hydra.main(version_base="1.3", config_path="conf", config_name="prepare")
def main(cfg: DictConfig) -> None:
    """Prepare the data that `cfg` describes, unless they are there, and say what they hold; or check them."""
    with exit_on_user_error():
        from simbal.data.command import prepare_or_check

        config = resolved(cfg)
        for line in prepare_or_check(config["data"], config["check"]):
            print(line)


if __name__ == "__main__":
    command_line.check(Path(__file__).with_name("conf"), __doc__, root="prepare")
    with command_line.exit_codes():
        main()
