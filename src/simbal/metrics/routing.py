"""Measures of how a router spreads a sequence or a token over experts, and of how evenly the experts are loaded.

Reference: arXiv 2506.14038, section 4.1 (SEU, entropy).
Shapes: B sequences, S sequence length, N = B*S tokens, E experts, K experts per token, R = S*K choices of a sequence.
The measures of load c take any leading dimensions (layers, say) and keep them.
"""

import torch
from torch import Tensor


def sequence_expert_use(topk_experts_NK: Tensor, num_sequences: int, num_experts: int) -> Tensor:
    """The SEU of each sequence, (B,): distinct experts chosen in it / E, in [K/E, 1]; it grows with its length."""
    experts_BR = topk_experts_NK.reshape(num_sequences, -1)
    used_BE = torch.zeros(num_sequences, num_experts, dtype=torch.bool, device=experts_BR.device)
    return used_BE.scatter_(1, experts_BR, True).double().mean(1)


def topk_entropy(topk_probs_NK: Tensor) -> Tensor:
    """The entropy -sum_k w_k ln w_k of each token, (N,), in nats; w: the chosen weights by their sum; at most ln K."""
    weights_NK = topk_probs_NK / topk_probs_NK.sum(-1, keepdim=True)
    entropy_N: Tensor = torch.special.entr(weights_NK).sum(-1)
    return entropy_N


def full_entropy(distribution_NE: Tensor) -> Tensor:
    """The entropy -sum_e p_e ln p_e of each token over all experts, (N,), in nats; rows sum to 1, so at most ln E."""
    entropy_N: Tensor = torch.special.entr(distribution_NE).sum(-1)
    return entropy_N


def mutual_information(mean_distribution_E: Tensor, mean_entropy: Tensor) -> Tensor:
    """The mutual information H(mean p) - mean H(p), in nats: what a token tells about its expert.

    It is 0 if every token has the same p. Leading dimensions (layers, say) are kept.
    """
    return full_entropy(mean_distribution_E) - mean_entropy


def choice_overlap(experts_NK: Tensor, others_NK: Tensor) -> Tensor:
    """The share of a token's K experts that the other choice has too, (N,): 1 if equal, K/E on average by chance."""
    same_NKK = experts_NK[:, :, None] == others_NK[:, None, :]
    return same_NKK.sum((1, 2)).double() / experts_NK.shape[1]


def max_vio(tokens_per_expert_E: Tensor) -> Tensor:
    """MaxVio of the load c: max c / mean c - 1, which is 0 if balanced and E - 1 if one expert takes everything.

    Reference: arXiv 2408.15664.
    """
    counts_E = tokens_per_expert_E.double()
    return counts_E.amax(-1) / counts_E.mean(-1) - 1


def unique_experts(tokens_per_expert_E: Tensor) -> Tensor:
    """The number of experts that are chosen at least once."""
    return (tokens_per_expert_E > 0).sum(-1)


def gini(tokens_per_expert_E: Tensor) -> Tensor:
    """The Gini coefficient of the load c, sum_ij |c_i - c_j| / (2 E sum c).

    It is 0 if balanced and (E - 1)/E if one expert takes everything.
    """
    sorted_E = tokens_per_expert_E.double().sort(-1).values
    num_experts = sorted_E.shape[-1]
    rank_E = torch.arange(1, num_experts + 1, dtype=torch.float64, device=sorted_E.device)
    # summed over i and j, a sorted c_r is taken 2 (r - 1) times with plus, 2 (E - r) times with minus
    return ((2 * rank_E - num_experts - 1) * sorted_E).sum(-1) / (num_experts * sorted_E.sum(-1))


def squared_variation(tokens_per_expert_E: Tensor) -> Tensor:
    """The squared coefficient of variation of the load c, CV^2 = var c / (mean c)^2.

    The variance has E in its denominator: CV^2 is 0 if balanced and E - 1 if one expert takes everything.
    """
    counts_E = tokens_per_expert_E.double()
    return counts_E.var(-1, correction=0) / counts_E.mean(-1).square()


def load_entropy(tokens_per_expert_E: Tensor) -> Tensor:
    """The entropy of c / sum c in nats: ln E if balanced; its exp is the number of experts in effective use."""
    counts_E = tokens_per_expert_E.double()
    entropy: Tensor = torch.special.entr(counts_E / counts_E.sum(-1, keepdim=True)).sum(-1)
    return entropy


def dead_experts(tokens_per_expert_E: Tensor) -> Tensor:
    """The number of experts that no token was sent to."""
    return (tokens_per_expert_E == 0).sum(-1)


def near_dead_experts(tokens_per_expert_E: Tensor) -> Tensor:
    """The number of experts with less than a tenth of the mean load, dead ones among them."""
    # in whole numbers, c < sum c / (10 E): no rounding decides
    counts_E = tokens_per_expert_E.long()
    return (10 * counts_E.shape[-1] * counts_E < counts_E.sum(-1, keepdim=True)).sum(-1)
