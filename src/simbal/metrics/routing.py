"""How a router spreads one sequence or one token over experts.

Reference: arXiv 2506.14038, section 4.1 (SEU, entropy).
Shapes: B sequences, S sequence length, N = B*S tokens, E experts, K experts per token.
"""

import torch
from torch import Tensor


def sequence_expert_use(topk_experts_NK: Tensor, num_sequences: int, num_experts: int) -> Tensor:
    """SEU of each sequence, (B,): distinct experts chosen in it / E, in [K/E, 1]; it grows with the length."""
    experts_BR = topk_experts_NK.reshape(num_sequences, -1)
    used_BE = torch.zeros(num_sequences, num_experts, dtype=torch.bool, device=experts_BR.device)
    return used_BE.scatter_(1, experts_BR, True).double().mean(1)


def topk_entropy(topk_probs_NK: Tensor) -> Tensor:
    """-sum_k w_k ln w_k of each token, (N,), in nats, with w the chosen weights divided by their sum; at most ln K."""
    weights_NK = topk_probs_NK / topk_probs_NK.sum(-1, keepdim=True)
    entropy_N: Tensor = torch.special.entr(weights_NK).sum(-1)
    return entropy_N


def full_entropy(distribution_NE: Tensor) -> Tensor:
    """-sum_e p_e ln p_e of each token, (N,), in nats, over all E probabilities; rows sum to 1, so at most ln E."""
    entropy_N: Tensor = torch.special.entr(distribution_NE).sum(-1)
    return entropy_N


def mutual_information(mean_distribution_E: Tensor, mean_entropy: Tensor) -> Tensor:
    """H(mean p) - mean H(p), in nats: what a token tells about its expert; 0 if every token has the same p.

    Leading dimensions (layers, say) are kept.
    """
    return full_entropy(mean_distribution_E) - mean_entropy


def choice_overlap(experts_NK: Tensor, others_NK: Tensor) -> Tensor:
    """Share of a token's K experts that the other choice has too, (N,): 1 if equal sets, K/E on average by chance."""
    same_NKK = experts_NK[:, :, None] == others_NK[:, None, :]
    return same_NKK.sum((1, 2)).double() / experts_NK.shape[1]
