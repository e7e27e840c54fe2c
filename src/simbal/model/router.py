"""The router: which experts each token goes to, with which weights, in fp32 under every precision.

Reference: arXiv 2506.14038, section 2; Shazeer et al. 2017 (arXiv 1701.06538).
Shapes: N tokens, D model width, E experts, K experts per token.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Routing:
    """What one MoE layer's router decided and measured; all fp32 but the int64 choice and counts."""

    logits_NE: Tensor
    probs_NE: Tensor  # after gating: softmax (rows sum to 1) or sigmoid (they do not)
    topk_experts_NK: Tensor
    topk_probs_NK: Tensor  # the weights applied to the experts' outputs
    tokens_per_expert_E: Tensor  # sums to N*K
    router_weight_ED: Tensor
    num_sequences: int  # N = num_sequences * S
    gating: str

    @property
    def distribution_NE(self) -> Tensor:
        """Probabilities whose rows sum to 1 under either gating; in log space, so that sigmoids need no epsilon."""
        return self.probs_NE if self.gating == "softmax" else F.logsigmoid(self.logits_NE).softmax(-1)


def gate(logits_NE: Tensor, gating: str) -> Tensor:
    """softmax over the experts, or a sigmoid for each."""
    return logits_NE.softmax(-1) if gating == "softmax" else logits_NE.sigmoid()


class Router(nn.Module):
    """logits = x W^T; the K largest of `logits + bias` are chosen; their weights are those of the unbiased logits.

    softmax: p = softmax(logits); sigmoid: p = sigmoid(logits). With `renormalize` the K weights are divided by their
    sum. Both gatings are monotone, so the choice is that of the logits; ties go to the lowest expert index.
    """

    def __init__(self, d_model: int, num_experts: int, top_k: int, gating: str, renormalize: bool) -> None:
        super().__init__()
        self.weight_ED = nn.Parameter(torch.empty(num_experts, d_model))
        self.top_k, self.gating, self.renormalize = top_k, gating, renormalize

    def forward(self, x_ND: Tensor, num_sequences: int, bias_E: Tensor | None = None) -> Routing:
        """Route N tokens that are `num_sequences` whole sequences; `bias_E` picks but never weighs."""
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_NE = F.linear(x_ND.float(), self.weight_ED.float())
            probs_NE = gate(logits_NE, self.gating)
            with torch.no_grad():
                scores_NE = logits_NE if bias_E is None else logits_NE + bias_E
                # a stable sort, because topk leaves the order of ties open
                topk_experts_NK = scores_NE.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
                tokens_per_expert_E = count(topk_experts_NK, len(self.weight_ED))
            topk_probs_NK = self._weights(logits_NE, probs_NE, topk_experts_NK)
        return Routing(
            logits_NE, probs_NE, topk_experts_NK, topk_probs_NK, tokens_per_expert_E, self.weight_ED, num_sequences,
            self.gating,
        )  # fmt: skip

    def _weights(self, logits_NE: Tensor, probs_NE: Tensor, experts_NK: Tensor) -> Tensor:
        if not self.renormalize:
            return probs_NE.gather(-1, experts_NK)
        # in log space: scores may be too small to divide by their sum
        chosen_NK = logits_NE.gather(-1, experts_NK)
        return (chosen_NK if self.gating == "softmax" else F.logsigmoid(chosen_NK)).softmax(-1)


def count(experts_NK: Tensor, num_experts: int) -> Tensor:
    """int64 number of tokens sent to each expert; integer sums are the same in any order."""
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=experts_NK.device)
    slots_R = experts_NK.reshape(-1)
    return counts_E.scatter_add_(0, slots_R, torch.ones_like(slots_R))
