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
