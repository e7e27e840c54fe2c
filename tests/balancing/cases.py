"""Cases of the conformance suite: every strategy of conf/balancing with its defaults and in variants."""

from functools import cache
from pathlib import Path

import yaml

from simbal import conformance
from simbal.conformance import Case

CONF = Path(__file__).parents[2] / "conf" / "balancing"
VARIANTS = {
    "lbl": [
        {"scope": "micro"}, {"scope": "global"}, {"scope": "global", "choice": "biased"}, {"gates": "sparse_raw"},
        {"gates": "sparse_renorm"}, {"gates": "layer", "choice": "biased", "scope": "micro"},
        {"norm": "E/K", "over_layers": "mean"},
    ],
    "simbal": [{"reduction": "mean"}],
    "lf": [{"center": True}, {"bias_on": "scores"}],
    "ernie_ortho": [{"decoupled": True}, {"decoupled": True, "scale_by_lr": False}],
    "temperature": [{"of_layers": [0.5, 2.0]}],
    "remoe": [{"balanced": False}],
    "bias_controller": [
        {"error": "sign", "update_rate": 0.001}, {"error": "linear", "momentum": 0.9}, {"proportional": 0.1},
        {"error": "tanh", "bias_on": "scores", "center": True},
    ],
    "hash": [{"table": "balanced", "weights": "equal"}, {"table": "round_robin"}],
    "quantile": [{"smoothing": 0.0}, {"estimator": "histogram", "smoothing": 0.0}],
    "lf_groups": [{"groups": 3, "group_top_k": 2}, {"group_top_k": 2}],
}  # fmt: skip


@cache
def registered(folder: Path = CONF) -> dict[str, dict]:
    """The keys of each strategy that a YAML file of `folder` defines, by name."""
    files = [yaml.safe_load(file.read_text()) for file in sorted(folder.glob("*.yaml"))]
    return {name: keys for file in files for name, keys in file.items() if "_target_" in keys}


def cases_of(name: str, keys: dict) -> list[Case]:
    """The strategy under every gating that it supports, and its variants under softmax or sigmoid, in turn."""
    cases = conformance.cases_of(name, keys)
    for number, changes in enumerate(VARIANTS.get(name, [])):
        label = ",".join([name, *(f"{key}={value}" for key, value in changes.items())])
        gatings = conformance.cases_of(label, keys | changes)[:2]
        cases.append(gatings[number % len(gatings)])
    return cases


QUICK = ("lbl", "lf")  # also tried with the third gating in the fast suite
ALL_CASES = [case for name, keys in registered().items() for case in cases_of(name, keys)]
CASES = [case for case in ALL_CASES if case.gating != "sqrtsoftplus" or case.name in QUICK]
EVERY_STRATEGY = [conformance.cases_of(name, keys)[0] for name, keys in registered().items()]
