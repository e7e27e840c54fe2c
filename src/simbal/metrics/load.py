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
    """Gini coefficient of the counts: 0 if balanced, (E - 1) / E if one expert takes everything."""
    counts_E = tokens_per_expert_E.double().sort(-1).values
    num_experts = counts_E.shape[-1]
    rank_E = 2 * torch.arange(1, num_experts + 1, device=counts_E.device) - num_experts - 1
    return (rank_E * counts_E).sum(-1) / (num_experts * counts_E.sum(-1))


def load_entropy(tokens_per_expert_E: Tensor) -> Tensor:
    """-sum_i q_i ln q_i in nats with q = c / sum c; its exp is the number of experts in effective use."""
    share_E = tokens_per_expert_E.double() / tokens_per_expert_E.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(share_E).sum(-1)
    return entropy
