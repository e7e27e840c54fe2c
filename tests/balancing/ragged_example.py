"""One worked example of ragged choices: four tokens and four experts, two experts per token on average."""

from typing import Any

import torch

from simbal.balancing.composition import Composition
from simbal.balancing.ragged import ReMoE, TopP
from simbal.balancing.thresholds import Capacity, DynamicQuantile, ExpertChoice, ExpertThreshold
from simbal.conformance import Case
from simbal.model.router import Router, Routing
from tests.balancing.example import IDS_BS, LOGITS_NE, finished

TWO_LARGEST = [{0, 1}, {0, 2}, {0, 1}, {0, 1}]
# the tokens with the two largest logits (or sigmoids) and softmax probabilities of each expert
LARGEST_LOGITS = [{0, 1, 2}, {0, 2}, {3}, {1, 3}]
LARGEST_SOFTMAX = [{0}, {0, 2}, {1, 3}, {1, 2, 3}]
TOP_P = {
    (0.4, "softmax"): [{0}, {0}, {1}, {0}],
    (0.8, "softmax"): [{0, 1}, {0, 2}, {0, 1, 3}, {0, 1}],
    (0.4, "sigmoid"): [{0, 1}, {0}, {0, 1}, {0, 1}],
    (0.8, "sigmoid"): [{0, 1, 2}, {0, 1, 2}, {0, 1, 3}, {0, 1, 2}],
}
TAKEN = {
    (1.0, "softmax"): LARGEST_SOFTMAX,
    (0.5, "softmax"): [set(), {0, 2}, {1, 3}, set()],
    (1.0, "sigmoid"): LARGEST_LOGITS,
    (0.5, "sigmoid"): [{0, 1}, {2}, {3}, set()],
}
KEPT = {1.0: [{0, 1}, {0, 2}, {1}, set()], 1.25: [{0, 1}, {0, 2}, {1}, {0, 1}]}  # two or three tokens per expert


def routing_by(strategy: Any, gating: str = "softmax", renormalize: bool = True) -> Routing:
    router = Router(4, 4, 2, gating, renormalize, layer=0)
    torch.nn.init.eye_(router.weight_ED)
    routing: Routing = router(LOGITS_NE, IDS_BS, Composition({"it": strategy}, {}))
    return routing


def expected(strategy: Any, gating: str) -> list[set[int]] | None:
    """The experts after a step on the same tokens, worked out by hand; None for unknown strategies."""
    known: dict[type, Any] = {
        ExpertChoice: TAKEN.get((getattr(strategy, "capacity_factor", 0.0), gating)),
        DynamicQuantile: LARGEST_SOFTMAX if gating == "softmax" else LARGEST_LOGITS,
        ExpertThreshold: LARGEST_LOGITS,
        TopP: TOP_P.get((getattr(strategy, "p", 0.0), gating)),
        ReMoE: [{0, 1}, {0, 2}, {0, 1, 3}, {0, 1}],
        Capacity: KEPT.get(getattr(strategy, "capacity_factor", 0.0)),
    }
    return next((known[kind] for kind in type(strategy).__mro__ if kind in known), None)


def its_choice_is_worked_out_by_hand(case: Case) -> None:
    strategy: Any = case.make()
    if not strategy.ragged:
        return
    experts = expected(strategy, case.gating)
    assert experts is not None
    if hasattr(strategy, "threshold_LE"):
        strategy.threshold_LE = torch.zeros(1, 4)
    first = routing_by(strategy, case.gating, case.renormalize)
    strategy.update(finished(strategy.measure([first])))
    routing = routing_by(strategy, case.gating, case.renormalize)
    weighted = TWO_LARGEST if isinstance(strategy, Capacity) else experts
    for token, (chosen, among) in enumerate(zip(experts, weighted, strict=True)):
        total = sum(routing.probs_NE[token, i].item() for i in among) if case.renormalize else 1.0
        weights = {i: routing.probs_NE[token, i].item() / total for i in chosen}
        slots = zip(routing.topk_experts_NK[token].tolist(), routing.topk_probs_NK[token].tolist(), strict=True)
        found = {i: weight for i, weight in slots if i < 4}
        assert found.keys() == weights.keys()
        assert all(abs(found[i] - weights[i]) < 1e-6 for i in weights)
