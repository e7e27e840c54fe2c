"""Run analyses, print their tables, and write them to <run>/analysis/<name>.json, or outputs/analysis without a run.

Examples:
    python evaluate.py run=outputs/default analysis=quality       # every finished run in the folder
    python evaluate.py analysis=orthogonalization
    python evaluate.py analysis=plan model=moe_m hardware=h200 gpus=8
    python evaluate.py analysis=[orthogonalization,gram_quanta] analysis.orthogonalization.trials=20
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from simbal import command_line
from simbal.config import resolved
from simbal.errors import exit_on_user_error

INPUTS = ("model", "hardware", "gpus")  # of analyses that ask for them by these names


@hydra.main(version_base="1.3", config_path="conf", config_name="evaluate")
def main(cfg: DictConfig) -> None:
    """Run the analyses that `cfg` names."""
    with exit_on_user_error():
        config = resolved(cfg)
        from simbal.analysis.evaluate import evaluate  # torch: 3 s that --help does not pay

        inputs = {key: config.get(key) for key in INPUTS}
        keys = (config[key] for key in ("analysis", "run", "overwrite", "accelerator", "output_dir"))
        evaluate(*keys, inputs)


if __name__ == "__main__":
    command_line.check(Path(__file__).with_name("conf"), __doc__, root="evaluate")
    with command_line.exit_codes():
        main()
