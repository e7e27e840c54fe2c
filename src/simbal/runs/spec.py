"""A run before it starts: its resolved config and the hash that identifies it.

No torch here: the sweep's parent process and `report.py` read runs without it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
from omegaconf import DictConfig

from simbal.config.compose import resolve, validate, validate_config
from simbal.config.schema import GROUPS, Config, can_change_result
from simbal.config.values import flatten

MAX_ARM = 100  # characters of a folder's name before the seed and the hash
SWEEP_FILE = "sweep.json"  # in outputs/<name>: the last sweep's command and the names of its run folders


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
        folder: its run folder; None: the folder whose name ends with the seed and the hash, or a new one.
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
        """The run folder, which never changes once it exists or a sweep has planned it."""
        if self.folder is not None:
            return self.folder
        return self.parent / (run_names(self.parent).get(self.suffix) or self.name_for(self.choices["balancing"]))

    @property
    def parent(self) -> Path:
        """The folder of all runs with the same name, outputs/<name>."""
        return Path(self.config.output_dir, self.config.name)

    @property
    def suffix(self) -> str:
        """The end of the folder's name, which identifies the run: its seed and eight digits of its hash."""
        return f"seed{self.config.seed}-{self.hash[:8]}"

    @property
    def arm(self) -> str:
        """The start of the folder's name, such as `simbal-coef_0.1`."""
        return self.path.name.removesuffix(f"-{self.suffix}")

    def name_for(self, label: str) -> str:
        """Return the name of a new folder for the run, given the label of its arm, such as `simbal coef=0.1`."""
        readable = re.sub(r"[^A-Za-z0-9._+-]+", "_", label.replace(" ", "-"))[:MAX_ARM]
        return f"{readable}-{self.suffix}"


def run_names(folder: Path) -> dict[str, str]:
    """Return the names of the run folders in outputs/<name>, existing or planned by a sweep, by `RunSpec.suffix`."""
    names: list[str] = []
    with suppress(OSError, ValueError, KeyError):
        names += orjson.loads((folder / SWEEP_FILE).read_bytes())["runs"]
    with suppress(OSError):
        names += [path.name for path in folder.iterdir()]
    return {"-".join(name.rsplit("-", 2)[1:]): name for name in names}
