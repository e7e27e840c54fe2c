"""Launchers that come with an optional package: a sentence for one that is not installed."""

from collections.abc import Iterable
from importlib.util import find_spec

from hydra.core.override_parser.types import Override

from simbal.errors import UserError

PACKAGES = {"joblib": "hydra_joblib_launcher", "slurm": "hydra_submitit_launcher", "ray": "hydra_ray_launcher"}
EXTRAS = {
    "joblib": "joblib", "slurm": "slurm", "submitit_local": "slurm", "submitit_slurm": "slurm", "ray": "ray",
    "ray_cluster": "ray",
}  # fmt: skip


def check_launcher(overrides: Iterable[Override]) -> None:
    """`UserError` if the launcher that they choose is not installed."""
    for override in overrides:
        extra = EXTRAS.get(str(override.value())) if override.key_or_group == "hydra/launcher" else None
        if extra and find_spec(f"hydra_plugins.{PACKAGES[extra]}") is None:
            raise UserError(f"{override.input_line} is not installed: pip install 'simbal[{extra}]'")
