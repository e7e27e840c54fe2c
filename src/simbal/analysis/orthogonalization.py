"""How far from orthonormal a bf16 router ends: trained by SimBal's loss, parametrised, or drawn.

Reference: arXiv 2506.14038, section 4.1 and table 2.
Shapes: T trials, E experts, D model width.
"""

from typing import Any

import torch
from torch import Tensor

from simbal.analysis import orthonormal
from simbal.analysis.deviations import PAPER, PAPER_SHAPE, Results, Spread, notes, table
from simbal.analysis.finding import Finding
from simbal.checks import whole_number
from simbal.errors import UserError
from simbal.metrics.orthogonality import max_deviation, mean_deviation
from simbal.model.init import generator

DISTANCES = {"Max Dev": max_deviation, "L1 Dist": mean_deviation}
GRAMS = {"bf16": torch.bfloat16, "fp32": torch.float32}
DEFINITION = {
    "Max Dev": "max over the E^2 entries of |W W^T - I|",
    "L1 Dist": "mean over the E^2 entries of |W W^T - I|",
    "bf16, fp32": "precision of the product W W^T; W is bf16, the difference fp32",
    "sd": "over trials, n - 1 in the denominator",
}


def orthogonalization(
    num_experts: int, d_model: int, trials: int, steps: int, lr: float, final_lr: float, seed: int
) -> Finding:
    """Measure `trials` routers of each kind; Trained starts from the OrthoInit of the same trial.

    Args:
        num_experts: the paper's numbers are for 32.
        d_model: at least `num_experts`; the paper's numbers are for 1536.
        trials: at least 2.
        steps: of Trained.
        lr: of Trained at its first step, from which it falls along a cosine.
        final_lr: where the cosine ends.
        seed: of all draws; every trial has generators of its own.

    Raises:
        UserError: a value is out of its range.
    """
    counts = {"num_experts": (num_experts, 2), "d_model": (d_model, 2), "trials": (trials, 2), "steps": (steps, 1)}
    for key, (value, least) in (counts | {"seed": (seed, 0)}).items():
        whole_number(f"analysis.orthogonalization.{key}", value, least)
    if num_experts > d_model:
        raise _refusal("num_experts", num_experts, f"must be at most d_model={d_model} to be orthonormal rows")
    if not 0 < lr <= 1:
        raise _refusal("lr", lr, "must be above 0 and at most 1")
    if not 0 <= final_lr <= lr:
        raise _refusal("final_lr", final_lr, f"must lie between 0 and lr={lr}")
    drawn_TED = orthonormal.ortho_init(num_experts, d_model, _generators(seed, "OrthoInit", trials))
    weights = {
        "Trained": orthonormal.trained(drawn_TED, steps, lr, final_lr),
        "Param": orthonormal.parametrized(num_experts, d_model, _generators(seed, "Param", trials)),
        "OrthoInit": drawn_TED,
    }
    results = {way: measured(weight_TED) for way, weight_TED in weights.items()}
    comparable = (num_experts, d_model) == PAPER_SHAPE
    return Finding([table(results, comparable)], notes(results, comparable), _record(results))


def measured(weight_TED: Tensor) -> dict[str, dict[str, Spread]]:
    """Both distances under both products, over trials."""
    spreads: dict[str, dict[str, Spread]] = {}
    for distance, deviation in DISTANCES.items():
        spreads[distance] = {}
        for gram, dtype in GRAMS.items():
            values_T = deviation(weight_TED, dtype).double()
            spreads[distance][gram] = Spread(values_T.mean().item(), values_T.std().item())
    return spreads


def _refusal(key: str, value: object, rule: str) -> UserError:
    return UserError(f"analysis.orthogonalization.{key}={value} {rule}")


def _generators(seed: int, way: str, trials: int) -> list[torch.Generator]:
    return [generator(seed, f"orthogonalization/{way}/{trial}") for trial in range(trials)]


def _record(results: Results) -> dict[str, Any]:
    def plain(spreads: dict[str, Spread]) -> dict[str, dict[str, float]]:
        return {name: spread._asdict() for name, spread in spreads.items()}

    return {
        "definition": DEFINITION,
        "results": {
            way: {distance: plain(spreads) for distance, spreads in distances.items()}
            for way, distances in results.items()
        },
        "paper": {"source": "arXiv 2506.14038, table 2", "shape": PAPER_SHAPE}
        | {way: plain(distances) for way, distances in PAPER.items()},
    }
