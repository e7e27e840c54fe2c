"""Turn text into tokens on disk, which train.py would else do when it starts.

Examples:
    python prepare.py
    python prepare.py data=files data.files='books/*.jsonl.zst' data.vocab_size=32768
"""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from simbal import command_line
from simbal.errors import exit_on_user_error
from simbal.run_folder import RunSpec


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    """Prepare the data that `cfg` describes, unless they are there, and say what they hold."""
    with exit_on_user_error():
        from simbal.data.store import prepare

        store = prepare(RunSpec.from_hydra(cfg).config["data"], progress=True)
        print(store.summary())


if __name__ == "__main__":
    if {"-m", "--multirun"} & set(sys.argv):
        raise SystemExit("error: prepare.py takes one config at a time: leave out -m")  # a sweep would start runs
    command_line.check(Path(__file__).with_name("conf"), __doc__)
    with command_line.exit_codes():
        main()
