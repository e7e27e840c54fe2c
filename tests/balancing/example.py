"""Small routings for calculations by hand: two sequences of two tokens over four experts."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from simbal.balancing.base import FinishedStep
from simbal.balancing.composition import Composition
from simbal.model.router import Candidates, Router, Routing, apply_gating, count_tokens

PROBS_BSE = torch.tensor(
    [[[0.4, 0.3, 0.2, 0.1], [0.5, 0.15, 0.3, 0.05]], [[0.1, 0.2, 0.3, 0.4], [0.3, 0.4, 0.1, 0.2]]]
).double()
WEIGHT_ED = torch.tensor([[1, 0.5, 0], [0, 1, -0.5]])
LOGITS_NE = torch.tensor([[2.0, 1.0, 0.0, -1.0], [1.5, -0.5, 0.5, -2.0], [0.2, 0.8, -1.0, 0.1], [1.0, 0.9, -0.4, -0.6]])
# the experts of each token by its two largest logits, and by the two largest probabilities of each expert
TWO_LARGEST = [{0, 1}, {0, 2}, {0, 1}, {0, 1}]
LARGEST_SOFTMAX = [{0}, {0, 2}, {1, 3}, {1, 2, 3}]


def routing_of(logits_NE, num_sequences, K=2, gating="softmax", experts_NK=None) -> Routing:
    """The routing by the K largest logits, or by `experts_NK`."""
    plain_NK = logits_NE.topk(K).indices
    chosen_NK = plain_NK if experts_NK is None else experts_NK
    probs_NE = apply_gating(logits_NE, gating)
    weights_NK, counts_E = probs_NE.gather(1, chosen_NK), count_tokens(chosen_NK, logits_NE.shape[1])
    return Routing(
        logits_NE, probs_NE, chosen_NK, weights_NK, counts_E, WEIGHT_ED, num_sequences, gating,
        experts_NK is not None, K,
    )  # fmt: skip


def example(gating="softmax"):
    """The logits, whose softmax is `PROBS_BSE`, and their routing."""
    logits_NE = PROBS_BSE.flatten(0, 1).log().requires_grad_()
    return logits_NE, routing_of(logits_NE, num_sequences=2, gating=gating)


def routing_by(strategy: Any, gating: str = "softmax", renormalize: bool = True) -> Routing:
    """The routing of `LOGITS_NE` under a strategy."""
    router = Router(4, 4, 2, gating, renormalize, layer=0)
    return router.route(LOGITS_NE, torch.eye(4), torch.zeros(1, 4), Composition({"it": strategy}, {}))


def mirrored(routing: Routing) -> Routing:
    """Another layer, with the experts in reverse order."""
    return replace(routing_of(routing.logits_NE.flip(1), routing.num_sequences))


def candidates(logits_NE: Tensor = LOGITS_NE, top_k: int = 2, gating: str = "softmax", layer: int = 0) -> Candidates:
    ids_BS = torch.zeros(1, len(logits_NE), dtype=torch.int64)
    return Candidates(layer, ids_BS, logits_NE, apply_gating(logits_NE, gating), top_k)


def finished(measured_LE, times: int = 1, factor: float = 1.0, weights=()) -> FinishedStep:
    """A step at learning rate 0.1 whose `times` micro-batches measured `measured_LE` in total."""
    return FinishedStep(torch.as_tensor(measured_LE), times, list(weights), 0.1, factor)


def finite_sets(scores_NE: Tensor) -> list[set[int]]:
    """The experts of each token with a score above -inf."""
    return [{i for i, score in enumerate(row) if score > -torch.inf} for row in scores_NE.tolist()]
