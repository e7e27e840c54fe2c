"""How evenly tokens are spread over experts.

Shapes: E experts; leading dimensions (layers, say) are kept.
"""

from torch import Tensor


def max_vio(tokens_per_expert_E: Tensor) -> Tensor:
    """max c / mean c - 1: 0 if balanced, E - 1 if one expert takes everything.

    Reference: arXiv 2408.15664.
    """
    counts_E = tokens_per_expert_E.double()
    return counts_E.amax(-1) / counts_E.mean(-1) - 1


def unique_experts(tokens_per_expert_E: Tensor) -> Tensor:
    """Number of experts chosen at least once."""
    return (tokens_per_expert_E > 0).sum(-1)
