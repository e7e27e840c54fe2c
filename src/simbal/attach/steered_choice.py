"""A host router's decision under a strategy that changes its logits or its choice.

Shapes: B sequences, S sequence length, N = B*S tokens, E experts, K experts per token.
"""

import torch
from torch import Tensor

from simbal.attach.forward_pass import Decision, wide
from simbal.attach.routers import HostRouter
from simbal.balancing.composition import Composition
from simbal.errors import UserError
from simbal.model.router import Candidates, gate, largest, topk_weights


def steer(
    router: HostRouter, logits_NE: Tensor, tokens_BS: Tensor, strategies: Composition, before: Decision | None = None
) -> Decision:
    """What our own `Router` would decide on the host's logits.

    Args:
        router: whose facts are used.
        logits_NE: its products x W^T, in any dtype.
        tokens_BS: ids; on the meta device if they are unknown.
        strategies: what changes the decision.
        before: the decision of the pass of which this one may be a recomputation; then its experts are taken.

    Raises:
        UserError: the strategy chooses by token ids, and they are unknown.
    """
    with torch.autocast(logits_NE.device.type, enabled=False):
        adjusted_NE = strategies.adjust_logits(logits_NE.to(wide(logits_NE)))
        probs_NE = gate(adjusted_NE, router.gating)
        with torch.no_grad():
            if before is not None and _recomputed(adjusted_NE, before.logits_NE):
                experts_NK, steered = before.topk_experts_NK, before.steered
            else:
                scores_NE = strategies.choice_scores(Candidates(router.layer, tokens_BS, adjusted_NE, probs_NE))
                if scores_NE.is_meta:
                    raise UserError(
                        f"{strategies.chooser} chooses experts by token ids, and this forward pass has none: give the "
                        "model input_ids, and under gradient checkpointing go backward before the next forward pass"
                    )
                experts_NK, steered = largest(scores_NE, router.top_k), scores_NE is not adjusted_NE
        weights_NK = topk_weights(adjusted_NE, probs_NE, experts_NK, router.gating, router.renormalize)
    return Decision(adjusted_NE, weights_NK, experts_NK, steered)


def _recomputed(logits_NE: Tensor, before_NE: Tensor) -> bool:
    """Whether these are the same logits but for rounding."""
    return logits_NE.shape == before_NE.shape and torch.allclose(logits_NE, before_NE, rtol=1e-3, atol=1e-5)
