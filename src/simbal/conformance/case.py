"""A strategy as the checks take it: how to make a new one of it, and under which gating."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from simbal.balancing.base import Balancing
from simbal.balancing.composition import build_strategy

SIZES = {"num_layers": 2, "num_experts": 6}
FACTS = {**SIZES, "seed": 0}
NO_CHANGE: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Case:
    """A strategy and how to make a new one of it."""

    name: str
    make: Callable[[], Balancing]
    gating: str = "softmax"

    @property
    def renormalize(self) -> bool:
        """Whether weights are divided by their sum: not those of relu, which stay as they are."""
        return self.gating != "relu"

    def __str__(self) -> str:
        return f"{self.name}-{self.gating}"


def cases_of(name: str, keys: Mapping[str, Any], changes: Mapping[str, Any] = NO_CHANGE) -> list[Case]:
    """Return a strategy under the gatings that it takes, or the first if it looks at weights alone.

    Args:
        name: the strategy's.
        keys: those of its YAML file, `_target_` among them.
        changes: other values for some of the keys, which the cases bear in their names.
    """
    label = ",".join([name, *(f"{key}={value}" for key, value in changes.items())])
    make = partial(build_strategy, name, {**keys, **changes}, FACTS)
    strategy = make()
    gatings = strategy.gatings[:1] if strategy.properties.scope == "weights" else strategy.gatings
    return [Case(label, make, gating) for gating in gatings]


def cases_of_file(file: Path) -> list[Case]:
    """Return every strategy of a YAML file such as conf/balancing/mine.yaml, at its defaults."""
    strategies = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [case for name, keys in strategies.items() if name != "defaults" for case in cases_of(name, keys)]
