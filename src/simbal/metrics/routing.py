"""Measures of a router's choices, of the load of its experts, and of how the load develops during training.

Measures of the load c keep leading dimensions, such as layers. A load without any tokens, which is possible if the
number of experts varies by token, counts as balanced.

Imports no torch at run time, because `report.py` imports the table of metrics, which refers to these functions.
Reference: arXiv 2506.14038, section 4.1 (SEU, entropy).
Shapes: B sequences, S sequence length, N = B*S tokens, E experts, K experts per token, R = S*K choices of a sequence, G
groups of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Curve = Sequence[tuple[int, float]]
FEWEST = 10  # points of a curve; half of them must be enough for a percentile
WINDOW = 5  # points of a running median, which ignores a single unbalanced batch
NEAR = 1.25  # times the final value


def sequence_expert_use(topk_experts_NK: Tensor, num_sequences: int, num_experts: int) -> Tensor:
    """Return the SEU of each sequence, (B,): distinct experts chosen in it / E. It grows with the sequence length."""
    experts_BR = topk_experts_NK.reshape(num_sequences, -1)
    return chosen_experts(experts_BR, num_experts).double().mean(1)


def topk_entropy(topk_probs_NK: Tensor) -> Tensor:
    """Return the entropy of each token's chosen weights divided by their sum, (N,), in nats: at most ln K.

    It is 0 for a token without experts.
    """
    sum_N1 = topk_probs_NK.sum(-1, keepdim=True)
    return full_entropy(topk_probs_NK / sum_N1.where(sum_N1 != 0, 1))


def full_entropy(distribution_NE: Tensor) -> Tensor:
    """Return the entropy of each row, (N,), in nats: at most ln E. Rows must sum to 1."""
    return -distribution_NE.xlogy(distribution_NE).sum(-1)  # 0 ln 0 = 0


def mutual_information(mean_distribution_E: Tensor, mean_entropy: Tensor) -> Tensor:
    """Return the mutual information of tokens and experts, H(mean p) - mean H(p), in nats.

    It is 0 if every token has the same p. Leading dimensions, such as layers, are kept.
    """
    return full_entropy(mean_distribution_E) - mean_entropy


def choice_overlap(experts_NK: Tensor, others_NK: Tensor, num_experts: int) -> Tensor:
    """Return the fraction of each token's K experts that the other choice shares, (N,); K/E on average by chance.

    Empty slots, which hold `num_experts`, are ignored. The fraction is 0 for a token without experts.
    """
    real_NK = experts_NK < num_experts
    same_NKK = (experts_NK[:, :, None] == others_NK[:, None, :]) & real_NK[:, :, None]
    return same_NKK.sum((1, 2)).double() / real_NK.sum(1).clamp(min=1)


def chosen_experts(topk_experts_NK: Tensor, num_experts: int) -> Tensor:
    """Return whether each token chose each expert, (N, E) bool. Index E marks an empty slot."""
    chosen = topk_experts_NK.new_zeros(len(topk_experts_NK), num_experts + 1)  # the last column is for empty slots
    return chosen.scatter_(1, topk_experts_NK, 1)[:, :num_experts].bool()


def max_vio(tokens_per_expert_E: Tensor) -> Tensor:
    """Return MaxVio of the load c, max c / mean c - 1: 0 if balanced, E - 1 if one expert gets all tokens.

    Reference: arXiv 2408.15664.
    """
    counts_E = _load(tokens_per_expert_E)
    return counts_E.amax(-1) / counts_E.mean(-1) - 1


def overload(tokens_per_expert_E: Tensor, num_groups: int) -> Tensor:
    """Return the overload of groups of experts: the largest load of a group divided by the mean load of the G groups.

    A group has E/G neighboring experts, as on a device of expert parallelism. The overload is 1 if balanced, G if one
    group gets all tokens, and MaxVio + 1 if each expert is a group.
    """
    sums_G = _load(tokens_per_expert_E).reshape(*tokens_per_expert_E.shape[:-1], num_groups, -1).sum(-1)
    return sums_G.amax(-1) / sums_G.mean(-1)


def unique_experts(tokens_per_expert_E: Tensor) -> Tensor:
    """Return the number of experts that were chosen at least once."""
    return (tokens_per_expert_E > 0).sum(-1)


def gini(tokens_per_expert_E: Tensor) -> Tensor:
    """Return the Gini coefficient of the load c, sum_ij |c_i - c_j| / (2 E sum c).

    It is 0 if balanced, and (E - 1)/E if one expert gets all tokens.
    """
    sorted_E = _load(tokens_per_expert_E).sort(-1).values
    num_experts = sorted_E.shape[-1]
    rank_E = sorted_E.new_ones(num_experts).cumsum(0)
    # in the double sum, the r-th smallest c appears 2 (r - 1) times with plus and 2 (E - r) times with minus
    return ((2 * rank_E - num_experts - 1) * sorted_E).sum(-1) / (num_experts * sorted_E.sum(-1))


def squared_variation(tokens_per_expert_E: Tensor) -> Tensor:
    """Return the squared coefficient of variation of the load c, CV^2 = var c / (mean c)^2.

    The variance has E in its denominator, so CV^2 is 0 if balanced, and E - 1 if one expert gets all tokens.
    """
    counts_E = _load(tokens_per_expert_E)
    return counts_E.var(-1, correction=0) / counts_E.mean(-1).square()


def load_entropy(tokens_per_expert_E: Tensor) -> Tensor:
    """Return the entropy of c / sum c in nats: ln E if balanced. Its exp is the effective number of experts."""
    counts_E = _load(tokens_per_expert_E)
    return full_entropy(counts_E / counts_E.sum(-1, keepdim=True))


def _load(tokens_per_expert_E: Tensor) -> Tensor:
    counts_E = tokens_per_expert_E.double()
    return counts_E.where(counts_E.sum(-1, keepdim=True) > 0, 1)


def dead_experts(tokens_per_expert_E: Tensor) -> Tensor:
    """Return the number of experts without tokens."""
    return (tokens_per_expert_E == 0).sum(-1)


def near_dead_experts(tokens_per_expert_E: Tensor) -> Tensor:
    """Return the number of experts with less than a tenth of the mean load, including dead ones."""
    # c < sum c / (10 E) in integers, without rounding
    counts_E = tokens_per_expert_E.long()
    return (10 * counts_E.shape[-1] * counts_E < counts_E.sum(-1, keepdim=True)).sum(-1)


def tail(curve: Curve) -> float | None:
    """Return the 95th percentile of the second half of a curve, with linear interpolation; None if it is too short."""
    return quantiles(_second_half(curve), n=20, method="inclusive")[-1] if len(curve) >= FEWEST else None


def steps_to_settle(curve: Curve) -> int | None:
    """Return the first step after which the load stays about as balanced as at the end of the run.

    From this step on, every median of five consecutive points is at most 1.25 times the median of the second half.
    None if the curve is too short, or rises steeply at its end.
    """
    if len(curve) < FEWEST:
        return None
    bound = NEAR * median(_second_half(curve))
    values = [value for _, value in curve]
    medians = [median(values[first : first + WINDOW]) for first in range(len(values) - WINDOW + 1)]
    above = [index for index, value in enumerate(medians) if value > bound]
    settled = above[-1] + 1 if above else 0
    return curve[settled][0] if settled < len(medians) else None


def _second_half(curve: Curve) -> list[float]:
    return [value for _, value in curve[len(curve) // 2 :]]
