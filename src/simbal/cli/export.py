"""Export trained models as Hugging Face folders for transformers, vLLM and lm-eval.

Examples:
    python export.py run=outputs/default/RUN to=model
    python export.py run=outputs/default to=models       # every finished run, to models/RUN
"""

from typing import Any

from simbal.cli.command_line import run
from simbal.errors import exit_on_user_error


def main(argv: list[str]) -> None:
    """Export the runs that a command line names."""
    run(export_composed, __doc__, argv, "export")


def export_composed(cfg: Any) -> None:
    """Export the runs that a composed config names."""
    with exit_on_user_error():
        from simbal.config.compose import resolved
        from simbal.hf.export import export  # imports torch, which takes 3 s and --help does not need

        config = resolved(cfg)
        export(config["run"], config["to"], config["overwrite"], config["data"]["tokenizer_path"])
