"""How evenly tokens are spread over experts.

Shapes: E experts; leading dimensions (layers, say) are kept.
"""

import torch
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


def gini(tokens_per_expert_E: Tensor) -> Tensor:
    """sum_ij |c_i - c_j| / (2 E sum c): 0 if balanced, (E - 1)/E if one expert takes everything."""
    sorted_E = tokens_per_expert_E.double().sort(-1).values
    num_experts = sorted_E.shape[-1]
    rank_E = torch.arange(1, num_experts + 1, dtype=torch.float64, device=sorted_E.device)
    # summed over i and j, a sorted c_r is taken 2 (r - 1) times with plus, 2 (E - r) times with minus
    return ((2 * rank_E - num_experts - 1) * sorted_E).sum(-1) / (num_experts * sorted_E.sum(-1))


def squared_variation(tokens_per_expert_E: Tensor) -> Tensor:
    """CV^2 = var c / (mean c)^2, with E in the variance's denominator: 0 if balanced, E - 1 if one takes everything."""
    counts_E = tokens_per_expert_E.double()
    return counts_E.var(-1, correction=0) / counts_E.mean(-1).square()


def load_entropy(tokens_per_expert_E: Tensor) -> Tensor:
    """Entropy of c / sum c in nats: ln E if balanced; its exp is the number of experts in effective use."""
    counts_E = tokens_per_expert_E.double()
    entropy: Tensor = torch.special.entr(counts_E / counts_E.sum(-1, keepdim=True)).sum(-1)
    return entropy


def dead_experts(tokens_per_expert_E: Tensor) -> Tensor:
    """Number of experts that no token was sent to."""
    return (tokens_per_expert_E == 0).sum(-1)


def near_dead_experts(tokens_per_expert_E: Tensor) -> Tensor:
    """Number of experts with less than a tenth of the mean load, dead ones among them."""
    # in whole numbers, c < sum c / (10 E): no rounding decides
    counts_E = tokens_per_expert_E.long()
    return (10 * counts_E.shape[-1] * counts_E < counts_E.sum(-1, keepdim=True)).sum(-1)
