"""Run analyses, print their tables, and write them to <run>/analysis/<name>.json, or outputs/analysis without a run.

Examples:
    python evaluate.py run=outputs/default analysis=quality       # every finished run in the folder
    python evaluate.py analysis=orthogonalization
    python evaluate.py analysis=plan model=moe_m hardware=h200 gpus=8
    python evaluate.py analysis=[orthogonalization,gram_quanta] analysis.orthogonalization.trials=20
"""

import os
import sys

os.environ["PYTHONSAFEPATH"] = "1"  # what lies beside a program is no library, nor for the programs that it starts
if os.path.realpath(sys.path[0]) == os.path.realpath(f"{__file__}/.."):
    del sys.path[0]

from typing import Any

from simbal.cli.command_line import run
from simbal.errors import exit_on_user_error

INPUTS = ("model", "hardware", "gpus")  # of analyses that ask for them by these names


def main(cfg: Any) -> None:
    """Run the analyses that `cfg` names."""
    with exit_on_user_error():
        from simbal.analysis.evaluate import evaluate  # torch: 3 s that --help does not pay
        from simbal.analysis.shared.trained import DataPlaces
        from simbal.config.check import resolved

        config = resolved(cfg)
        inputs = {key: config.get(key) for key in INPUTS}
        keys = (config[key] for key in ("analysis", "run", "overwrite", "accelerator", "output_dir"))
        evaluate(*keys, inputs, DataPlaces.of(config["data"]))


if __name__ == "__main__":
    run(main, __doc__, "evaluate")
