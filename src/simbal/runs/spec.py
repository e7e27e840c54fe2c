"""A run before it starts: its resolved config, and the hash that tells it from all others.

No torch here: the sweep's parent process and `report.py` read runs without it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from simbal.config.compose import checked, resolved, typed
from simbal.config.schema import GROUPS, Config, can_change_result
from simbal.config.values import flatten


def result_keys(written: dict[str, Any]) -> dict[str, Any]:
    """Return the dotted keys of a written config that can change the result, with their values."""
    return {key: value for key, value in flatten(written).items() if can_change_result(key)}


def config_hash(written: dict[str, Any]) -> str:
    """Return the sha256 (64 hex digits) over every key of a written config that can change the result."""
    return hashlib.sha256(json.dumps(result_keys(written), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class RunSpec:
    """A run before it starts.

    Args:
        config: its configuration, resolved and checked.
        choices: the option chosen in each group.
        written: the config as plain values, as they are written, shown and hashed: with the very keys that the run was
            begun with.
        trusted: whether the config is the user's; else it was read from a folder, which may be anybody's.
        folder: the folder that it was read from.
    """

    config: Config
    choices: dict[str, str]
    written: dict[str, Any]
    trusted: bool = field(default=True, compare=False)
    folder: Path | None = field(default=None, compare=False)

    @classmethod
    def from_hydra(cls, cfg: DictConfig) -> "RunSpec":
        """Resolve and check a composed config, as Hydra composes it or as it hands it to a job."""
        from hydra.core.hydra_config import HydraConfig  # a tenth of a second, which reading a folder can do without

        options = (cfg.hydra if "hydra" in cfg else HydraConfig.get()).runtime.choices
        return cls.checked(resolved(cfg), options)

    @classmethod
    def checked(cls, written: dict[str, Any], options: Mapping[str, Any]) -> "RunSpec":
        """Return the run of a resolved config, given the option of each group; `ConfigError` if the config is wrong."""
        config = checked(written)
        choices = {group: str(options[group]) for group in GROUPS if group in options}
        choices["balancing"] = "_".join(config.balancing)  # a list of strategies is no single option
        return cls(config, choices, written)

    @classmethod
    def saved(cls, written: Any, choices: Any, folder: Path) -> "RunSpec":
        """Return the run that the config.yaml in `folder` describes.

        Raises:
            ConfigError: a key is missing or unknown, a value is wrong, or values do not go together.
            TypeError: these are no choices of options.
        """
        config = typed(Config, written)
        if choices.keys() < {*GROUPS} or not all(isinstance(text, str) for text in (*choices, *choices.values())):
            raise TypeError("these are no choices of options")
        return cls(config, choices, written, trusted=False, folder=folder)

    @cached_property
    def hash(self) -> str:
        """The config's hash, 64 hex digits."""
        return config_hash(self.written)

    @cached_property
    def path(self) -> Path:
        """The folder of the run; the readable part of its name is for people, the hash tells runs apart."""
        if self.folder is not None:
            return self.folder
        readable = f"{self.choices['balancing']}-{self.choices['model']}-seed{self.config.seed}"
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", readable)[:100]
        return Path(self.config.output_dir, self.config.name, f"{readable}-{self.hash[:8]}")
