"""Write trained models for transformers, vLLM and lm-eval: folders in the format of Hugging Face.

Examples:
    python export.py run=outputs/default/RUN to=model
    python export.py run=outputs/default to=models       # every finished run, to models/RUN
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig

from simbal import command_line
from simbal.config import resolved
from simbal.errors import exit_on_user_error


@hydra.main(version_base="1.3", config_path="conf", config_name="export")
def main(cfg: DictConfig) -> None:
    """Export the runs that `cfg` names."""
    with exit_on_user_error():
        config = resolved(cfg)
        from simbal.hub.export import export  # torch: 3 s that --help does not pay

        export(config["run"], config["to"], config["overwrite"])


if __name__ == "__main__":
    command_line.check(Path(__file__).with_name("conf"), __doc__, root="export")
    with command_line.exit_codes():
        main()
