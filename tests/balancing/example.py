"""Two sequences of two tokens over four experts, small enough to work out by hand."""

from dataclasses import replace

import torch

from simbal.model.router import Routing, count_tokens, apply_gating

PROBS_BSE = torch.tensor(
    [[[0.4, 0.3, 0.2, 0.1], [0.5, 0.15, 0.3, 0.05]], [[0.1, 0.2, 0.3, 0.4], [0.3, 0.4, 0.1, 0.2]]]
).double()
WEIGHT_ED = torch.tensor([[1, 0.5, 0], [0, 1, -0.5]])


def routing_of(logits_NE, num_sequences, K=2, gating="softmax", experts_NK=None) -> Routing:
    """`experts_NK` are those of the K largest logits unless they are given."""
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


def mirrored(routing: Routing) -> Routing:
    """Another layer, with the experts in opposite order."""
    return replace(routing_of(routing.logits_NE.flip(1), routing.num_sequences))
