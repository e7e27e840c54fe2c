"""Every strategy of conf/balancing, at its defaults and in its variants, as the conformance suite takes it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from simbal.balancing.base import Balancing
from simbal.balancing.composition import build_strategy

CONF = Path(__file__).parents[2] / "conf" / "balancing"
SIZES = {"num_layers": 2, "num_experts": 6}
FACTS = {**SIZES, "seed": 0}
VARIANTS = {
    "lbl": [
        {"scope": "micro"}, {"scope": "global"}, {"scope": "global", "choice": "biased"}, {"gates": "sparse_raw"},
        {"gates": "sparse_renorm"}, {"gates": "layer", "choice": "biased", "scope": "micro"},
        {"norm": "E/K", "over_layers": "mean"},
    ],
    "simbal": [{"reduction": "mean"}],
    "lf": [{"bias_on": "scores"}, {"center": True}],
    "ernie_ortho": [{"decoupled": True}, {"decoupled": True, "scale_by_lr": False}],
    "quantile": [{"smoothing": 0.0}],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A strategy and how to make a new one of it."""

    name: str
    make: Callable[[], Balancing]
    gating: str = "softmax"

    def __str__(self) -> str:
        return f"{self.name}-{self.gating}"


def registered(folder: Path = CONF) -> dict[str, dict]:
    """Strategies by name with their keys: those that a YAML file of `folder` holds itself."""
    files = [yaml.safe_load(file.read_text()) for file in sorted(folder.glob("*.yaml"))]
    return {name: keys for file in files for name, keys in file.items() if name != "defaults"}


def cases_of(name: str, keys: dict) -> list[Case]:
    """The strategy and its variants, each under both gatings unless it looks at weights alone."""
    made = []
    for changes in [{}, *VARIANTS.get(name, [])]:
        label = ",".join([name, *(f"{key}={value}" for key, value in changes.items())])
        make = partial(build_strategy, name, keys | changes, FACTS)
        gatings = ("softmax",) if make().properties.scope == "weights" else ("softmax", "sigmoid")
        made += [Case(label, make, gating) for gating in gatings]
    return made


CASES = [case for name, keys in registered().items() for case in cases_of(name, keys)]
