"""The dispatch of a layer's tokens to its experts, planned once per call as every backend needs it.

Shapes: N tokens, K experts per token, R = N*K routed rows, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RoutingPlan:
    """The slot `t*K + k` (token t, k-th choice) of each row when rows are sorted by expert, and where each expert ends.

    Only `weights_NK` carries a gradient.
    """

    weights_NK: Tensor
    order_R: Tensor  # slot of each expert-sorted row; stable, so rows of one expert keep the tokens' order
    inverse_R: Tensor  # expert-sorted row of each slot
    ends_E: Tensor  # int32, cumulative; an expert without rows ends where the one before it ends

    @classmethod
    def build(cls, experts_NK: Tensor, weights_NK: Tensor, num_experts: int) -> "RoutingPlan":
        """Sort the slots by expert."""
        sorted_R, order_R = torch.sort(experts_NK.reshape(-1), stable=True)
        inverse_R = torch.empty_like(order_R)
        inverse_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
        # not bincount: on CUDA it waits for the device
        experts_E = torch.arange(num_experts, device=order_R.device)
        ends_E = torch.searchsorted(sorted_R, experts_E, right=True).to(torch.int32)
        return cls(weights_NK, order_R, inverse_R, ends_E)

    @property
    def top_k(self) -> int:
        """Experts per token, K."""
        return self.weights_NK.shape[1]

    @property
    def tokens_R(self) -> Tensor:
        """The token of each expert-sorted row, (R,)."""
        return self.order_R // self.top_k
