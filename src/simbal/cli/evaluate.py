"""Run analyses, print their tables, and write them to <run>/analysis/<name>.json, or outputs/analysis without a run.

Examples:
    python evaluate.py run=outputs/default analysis=quality       # every finished run in the folder
    python evaluate.py hf=FOLDER data=pysource analysis=[quality,redundancy,routing]   # a model of Hugging Face
    python evaluate.py analysis=orthogonalization
    python evaluate.py analysis=plan model=moe_m hardware=h200 gpus=8
    python evaluate.py analysis=[orthogonalization,flops] model=moe_m analysis.orthogonalization.trials=20
"""

from collections.abc import Iterable
from typing import Any

from simbal.cli.command_line import run
from simbal.errors import ConfigError, UserError, exit_on_user_error

OF_HF = ("hf", "name", "context", "dtype")
OF_TRAINING = ("data.seq_len", "data.vocab_size", "data.validation_tokens", "data.document_mask")
INPUTS = ("model", "hardware", "gpus")  # of analyses that ask for them by these names


def main(argv: list[str]) -> None:
    """Run the analyses that a command line names."""
    run(evaluate_composed, __doc__, argv, "evaluate")


def evaluate_composed(cfg: Any) -> None:
    """Run the analyses that `cfg` names."""
    with exit_on_user_error():
        from simbal.analysis.evaluate import evaluate  # torch: 3 s that --help does not pay
        from simbal.analysis.trained import DataPlaces
        from simbal.config.compose import resolved
        from simbal.hf.load import HFRequest

        config = resolved(cfg)
        if not config.get("analysis"):
            raise ConfigError("give analysis=NAME; --help lists them")
        inputs = {key: config.get(key) for key in INPUTS}
        keys = {key: config[key] for key in ("run", "overwrite", "accelerator", "output_dir")}
        if config["hf"] is not None:
            refuse_typed(OF_TRAINING, "decides nothing for hf=, whose windows are context= of its own tokens")
            of_hf = {key: config[key] for key in (*OF_HF, "data", "accelerator", "output_dir")}
            evaluate(config["analysis"], **keys, inputs=inputs, hf=HFRequest(**of_hf))
            return
        refuse_keys_of_hf(config)
        evaluate(config["analysis"], **keys, inputs=inputs, places=DataPlaces.of(config["data"]))


def refuse_keys_of_hf(config: dict[str, Any]) -> None:
    """Raise `UserError` for keys that say how to measure a model of Hugging Face, where none is named."""
    if "source" in config["data"]:
        raise UserError(f"data={config['data']['source']} is the text of hf=: a run is measured on its own data")
    refuse_typed(OF_HF[1:], "is for hf=")


def refuse_typed(keys: Iterable[str], reason: str) -> None:
    """Raise `UserError` if the command line sets one of these keys, which would change nothing."""
    from hydra.core.hydra_config import HydraConfig

    typed = {override.partition("=")[0].lstrip("+") for override in HydraConfig.get().overrides.task}
    if given := [key for key in keys if key in typed]:
        raise UserError(f"{given[0]}= {reason}: leave it out")
