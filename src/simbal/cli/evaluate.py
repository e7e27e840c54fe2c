"""Run analyses, print their tables, and write them to <run>/analysis/<name>.json, or outputs/analysis without a run.

Examples:
    python evaluate.py run=outputs/default analysis=quality       # every finished run in the folder
    python evaluate.py analysis=orthogonalization
    python evaluate.py analysis=plan model=moe_m hardware=h200 gpus=8
    python evaluate.py analysis=[orthogonalization,gram_quanta] analysis.orthogonalization.trials=20
"""

from typing import Any

from simbal.cli.command_line import run
from simbal.errors import exit_on_user_error

INPUTS = ("model", "hardware", "gpus")  # of analyses that ask for them by these names


def main(argv: list[str]) -> None:
    """Run the analyses that a command line names."""
    run(evaluate_composed, __doc__, argv, "evaluate")


def evaluate_composed(cfg: Any) -> None:
    """Run the analyses that `cfg` names."""
    with exit_on_user_error():
        from simbal.analysis.evaluate import evaluate  # torch: 3 s that --help does not pay
        from simbal.analysis.shared.trained import DataPlaces
        from simbal.config.check import resolved

        config = resolved(cfg)
        inputs = {key: config.get(key) for key in INPUTS}
        keys = {key: config[key] for key in ("run", "overwrite", "accelerator", "output_dir")}
        evaluate(config["analysis"], **keys, inputs=inputs, places=DataPlaces.of(config["data"]))
