"""Write trained models for transformers, vLLM and lm-eval: folders in the format of Hugging Face.

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
    """Export the runs that `cfg` names."""
    with exit_on_user_error():
        from simbal.config.compose import resolved
        from simbal.hf.export import export  # torch: 3 s that --help does not pay

        config = resolved(cfg)
        export(config["run"], config["to"], config["overwrite"], config["data"]["tokenizer_path"])
