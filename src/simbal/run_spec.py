"""One run before it starts: its resolved config, and the hash that tells it from all others.

No torch here: the sweep's parent process and `report.py` read runs without it.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from simbal.config import flatten, resolved
from simbal.config_check import check

NOT_HASHED = (
    "name",
    "baseline",
    "columns",
    "dry_run",
    "retry_failed",
    "output_dir",
    "logger",
    "data.cache_dir",
    "data.tokenizer_path",
    "data.threads",
    "trainer.progress_bar",
    "trainer.force_precision",
    "trainer.ckpt_every",
    "trainer.ckpt_seconds",
)
GROUPS = ("model", "router", "balancing", "experts", "data", "optim", "trainer", "logger")


def result_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys of the resolved config, less those that cannot change the result."""
    return {key: value for key, value in flatten(config).items() if _can_change_result(key)}


@cache
def _can_change_result(key: str) -> bool:
    return not any(f"{key}.".startswith(f"{k}.") for k in NOT_HASHED)


def config_hash(config: dict[str, Any]) -> str:
    """sha256 (64 hex digits) over every key of the resolved config that can change the result."""
    return hashlib.sha256(json.dumps(result_keys(config), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class RunSpec:
    """One run before it starts: its resolved config (plain dicts) and the option chosen in each group."""

    config: dict[str, Any]
    choices: dict[str, str]

    @classmethod
    def from_hydra(cls, cfg: DictConfig) -> "RunSpec":
        """Resolve and check a composed config, as Hydra composes it or as it hands it to a job."""
        from hydra.core.hydra_config import HydraConfig  # a tenth of a second, which reading a folder can do without

        options = (cfg.hydra if "hydra" in cfg else HydraConfig.get()).runtime.choices
        config = resolved(cfg)
        check(config)
        choices = {group: str(options[group]) for group in GROUPS if group in options}
        choices["balancing"] = "_".join(config["balancing"])  # a list of strategies is no single option
        return cls(config, choices)

    @classmethod
    def saved(cls, config: Any, choices: Any) -> "RunSpec":
        """What a config.yaml says; `TypeError` unless it has the parts that every run has.

        Its values were checked before it was written; a run of an earlier version may lack some of today's keys.
        """
        parts = [config.get(group) for group in GROUPS] + [*config["balancing"].values()]
        texts = [config.get(key) for key in ("name", "baseline", "output_dir")] + [choices.get(key) for key in GROUPS]
        texts += [*choices, *choices.values()]
        whole = all(isinstance(part, dict) for part in parts) and all(isinstance(text, str) for text in texts)
        if not whole or not isinstance(config.get("seed"), int) or isinstance(config["seed"], bool):
            raise TypeError("a part that every run has is missing")
        return cls(config, choices)

    @cached_property
    def hash(self) -> str:
        """The config's hash, 64 hex digits."""
        return config_hash(self.config)

    @property
    def path(self) -> Path:
        """Where the run lives; the readable part is for people, the hash tells runs apart."""
        readable = f"{self.choices['balancing']}-{self.choices['model']}-seed{self.config['seed']}"
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", readable)[:100]
        return Path(self.config["output_dir"], self.config["name"], f"{readable}-{self.hash[:8]}")
