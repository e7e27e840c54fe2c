"""Run analyses, print their tables, and write them to <run>/analysis/<name>.json, or outputs/analysis without a run.

Examples:
    python evaluate.py run=outputs/default analysis=quality       # all finished runs in the folder
    python evaluate.py hf=FOLDER data=pysource analysis=[quality,redundancy,routing]   # a Hugging Face model
    python evaluate.py analysis=orthogonalization
    python evaluate.py analysis=plan model=moe_m hardware=h200 gpus=8
    python evaluate.py analysis=[orthogonalization,flops] analysis.orthogonalization.trials=20
"""

from collections.abc import Iterable
from typing import Any

from simbal.cli.command_line import run
from simbal.errors import ConfigError, UserError, exit_on_user_error

HF_KEYS = ("hf", "name", "context", "dtype")
RUN_KEYS = ("data.seq_len", "data.vocab_size", "data.validation_tokens", "data.document_mask")
INPUTS = ("model", "hardware", "gpus")  # passed to the analyses that have a parameter of this name


def main(argv: list[str]) -> None:
    """Run the analyses of a command line."""
    run(evaluate_composed, __doc__, argv, "evaluate")


def evaluate_composed(cfg: Any) -> None:
    """Run the analyses of a composed config."""
    with exit_on_user_error():
        from simbal.analysis.evaluate import evaluate  # imports torch, which --help does not need
        from simbal.analysis.trained import DataPlaces
        from simbal.config.compose import resolved
        from simbal.hf.load import HFRequest

        config = resolved(cfg)
        if not config.get("analysis"):
            raise ConfigError("give analysis=NAME; --help lists the analyses")
        inputs = {key: config.get(key) for key in INPUTS}
        keys = {key: config[key] for key in ("run", "overwrite", "accelerator", "output_dir")}
        if config["hf"] is not None:
            refuse_overrides(RUN_KEYS, "does not apply to hf=: use context= for the sequence length")
            of_hf = {key: config[key] for key in (*HF_KEYS, "data", "accelerator", "output_dir")}
            evaluate(config["analysis"], **keys, inputs=inputs, hf=HFRequest(**of_hf))
            return
        if "source" in config["data"]:
            raise UserError(f"data={config['data']['source']} applies only to hf=; runs are measured on their own data")
        refuse_overrides(HF_KEYS[1:], "applies only to hf=")
        evaluate(config["analysis"], **keys, inputs=inputs, places=DataPlaces.of(config["data"]))


def refuse_overrides(keys: Iterable[str], reason: str) -> None:
    """Raise `UserError` if the command line sets one of these keys, which would have no effect."""
    from hydra.core.hydra_config import HydraConfig

    given = {override.partition("=")[0].lstrip("+") for override in HydraConfig.get().overrides.task}
    for key in keys:
        if key in given:
            raise UserError(f"{key}= {reason}; remove it")
