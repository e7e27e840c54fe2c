"""A run before it starts: its resolved config and the hash that identifies it.

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

from simbal.config.compose import resolve, validate, validate_config
from simbal.config.schema import GROUPS, Config, can_change_result
from simbal.config.values import flatten


def result_keys(written: dict[str, Any]) -> dict[str, Any]:
    """Return the dotted keys of a config that can change the result, with their values."""
    return {key: value for key, value in flatten(written).items() if can_change_result(key)}


def config_hash(written: dict[str, Any]) -> str:
    """Return the sha256 (64 hex digits) over all keys of a config that can change the result."""
    return hashlib.sha256(json.dumps(result_keys(written), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class RunSpec:
    """A run before it starts.

    Args:
        config: the resolved and validated configuration.
        choices: the option chosen in each config group.
        written: the config as plain values, which are saved, shown and hashed.
        trusted: whether the config comes from this user; a config read from a folder may come from anybody.
        folder: the folder that the config was read from.
    """

    config: Config
    choices: dict[str, str]
    written: dict[str, Any]
    trusted: bool = field(default=True, compare=False)
    folder: Path | None = field(default=None, compare=False)

    @classmethod
    def from_hydra(cls, cfg: DictConfig) -> "RunSpec":
        """Resolve and validate a config from Hydra, with or without the section `hydra`."""
        from hydra.core.hydra_config import HydraConfig  # takes 0.1 s, which reading a folder does not need

        options = (cfg.hydra if "hydra" in cfg else HydraConfig.get()).runtime.choices
        return cls.from_resolved(resolve(cfg), options)

    @classmethod
    def from_resolved(cls, written: dict[str, Any], options: Mapping[str, Any]) -> "RunSpec":
        """Validate a resolved config, given the option of each group; `ConfigError` if it is wrong."""
        config = validate_config(written)
        choices = {group: str(options[group]) for group in GROUPS if group in options}
        choices["balancing"] = "_".join(config.balancing)  # a list of strategies is not one option
        return cls(config, choices, written)

    @classmethod
    def from_saved(cls, written: Any, choices: Any, folder: Path) -> "RunSpec":
        """Return the run that the config.yaml in `folder` describes; `ConfigError` if the config is wrong."""
        if choices.keys() < {*GROUPS}:
            raise KeyError("choices")
        return cls(validate(Config, written), choices, written, trusted=False, folder=folder)

    @cached_property
    def hash(self) -> str:
        """The hash of the config, 64 hex digits."""
        return config_hash(self.written)

    @cached_property
    def path(self) -> Path:
        """The run folder; its name starts with a readable part and ends with eight digits of the hash."""
        if self.folder is not None:
            return self.folder
        readable = f"{self.choices['balancing']}-{self.choices['model']}-seed{self.config.seed}"
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", readable)[:100]
        return Path(self.config.output_dir, self.config.name, f"{readable}-{self.hash[:8]}")
