"""The feed-forward layer of a block: a mixture of SwiGLU experts, or one dense SwiGLU.

Reference: arXiv 2506.14038, equations 1 and 2; SwiGLU: Shazeer 2020 (arXiv 2002.05202); shared experts: DeepSeekMoE
(arXiv 2401.06066).
Shapes: B batch, S sequence, N = B*S tokens, D model width, E experts, F hidden width.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simbal.experts.backends import Biases, RoutingPlan
from simbal.experts.select import apply_experts
from simbal.model.matmul import linear
from simbal.model.router import ExpertWeights, Router, Routing, Steering

BIASES = ("b13_E2F", "b2_ED", "b13_2F", "b2_D")  # names of the bias parameters below


class MoELayer(nn.Module):
    """A mixture of experts, y_t = sum_k p_tk expert_e(x_t), where e is the k-th expert of token t.

    With `bias`, each of an expert's three matrices has a bias, as in the paper's equation 1.

    The layer is dropless: every chosen expert computes every token sent to it. The layer's output for a token without
    experts is 0, so the token passes through the residual connection unchanged.

    Shared experts compute every token, and their output is added with weight 1. They are implemented as one dense
    SwiGLU, `num_shared` times as wide as an expert.
    """

    def __init__(
        self,
        router: Router,
        d_model: int,
        d_expert: int,
        backend: str | None,
        bias: bool = False,
        num_shared: int = 0,
    ) -> None:
        super().__init__()
        num_experts = len(router.weight_ED)
        assert backend is not None, "a mixture of experts needs a backend"
        self.router, self.backend, self.apply_experts = router, backend, apply_experts
        self.w13_E2FD = nn.Parameter(torch.empty(num_experts, 2, d_expert, d_model))
        self.w2_EFD = nn.Parameter(torch.empty(num_experts, d_expert, d_model))
        self.b13_E2F = nn.Parameter(torch.empty(num_experts, 2, d_expert)) if bias else None
        self.b2_ED = nn.Parameter(torch.empty(num_experts, d_model)) if bias else None
        self.shared = FeedForward(d_model, num_shared * d_expert, bias) if num_shared else None

    @property
    def biases(self) -> Biases | None:
        """The biases of gate and up (E, 2, F) and of down (E, D), or None."""
        return None if self.b13_E2F is None or self.b2_ED is None else (self.b13_E2F, self.b2_ED)

    def forward(
        self,
        x_BSD: Tensor,
        tokens_BS: Tensor,
        steering: Steering | None = None,
        router_input_BSD: Tensor | None = None,
    ) -> tuple[Tensor, Routing]:
        """Return the output, (B, S, D), and the router's decisions; the router reads `x_BSD` by default."""
        x_ND = x_BSD.flatten(0, 1)
        routing = self.router(x_ND if router_input_BSD is None else router_input_BSD.flatten(0, 1), tokens_BS, steering)
        combine = self._ragged if routing.ragged else self._combined
        y_ND = combine(x_ND, routing.topk_experts_NK, routing.topk_probs_NK)
        y_BSD = self.with_shared(y_ND.view_as(x_BSD), x_BSD)
        return y_BSD, replace(routing, experts=ExpertWeights(self.w13_E2FD, self.w2_EFD))

    def with_shared(self, y_BSD: Tensor, x_BSD: Tensor) -> Tensor:
        """Return `y_BSD`, the output of the chosen experts, plus the output of any shared experts."""
        return y_BSD if self.shared is None else y_BSD + self.shared(x_BSD)

    def _combined(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        plan = RoutingPlan.build(experts_NK, weights_NK, len(self.w2_EFD))
        return self.apply_experts(self.backend, x_ND, plan, self.w13_E2FD, self.w2_EFD, self.biases)

    def _ragged(self, x_ND: Tensor, experts_NE: Tensor, weights_NE: Tensor) -> Tensor:
        """Compute each filled slot as a separate token with one expert, so backends need not handle empty slots.

        On a GPU this synchronizes with the host, which needs the number of filled slots.
        """
        token_R, slot_R = (experts_NE < len(self.w2_EFD)).nonzero(as_tuple=True)
        if not len(token_R):
            # zero, but with a gradient for every weight: all FSDP ranks must reduce the same gradients
            parts = weights_NE, self.w13_E2FD, self.w2_EFD, *(self.biases or ())
            return x_ND * 0 + 0 * torch.stack([part.sum() for part in parts]).sum()
        chosen_R1, weights_R1 = (table_NE[token_R, slot_R, None] for table_NE in (experts_NE, weights_NE))
        y_RD = self._combined(x_ND[token_R], chosen_R1, weights_R1)
        wide = torch.promote_types(y_RD.dtype, torch.float32)
        y_ND = torch.zeros(x_ND.shape, dtype=wide, device=x_ND.device).index_add(0, token_R, y_RD.to(wide))
        return y_ND.to(y_RD.dtype)


class FeedForward(nn.Module):
    """A dense SwiGLU, y = W2^T (silu(Wgate x) * (Wup x)), with the parameter layout of one expert."""

    def __init__(self, d_model: int, d_hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.w13_2FD = nn.Parameter(torch.empty(2, d_hidden, d_model))
        self.w2_FD = nn.Parameter(torch.empty(d_hidden, d_model))
        self.b13_2F = nn.Parameter(torch.empty(2, d_hidden)) if bias else None
        self.b2_D = nn.Parameter(torch.empty(d_model)) if bias else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the output, in the shape of `x_BSD`."""
        gate_up_BSF = linear(x_BSD, self.w13_2FD.flatten(0, 1))
        if self.b13_2F is not None:
            gate_up_BSF = gate_up_BSF + self.b13_2F.flatten().to(gate_up_BSF.dtype)
        gate_BSF, up_BSF = gate_up_BSF.chunk(2, -1)
        y_BSD = linear(F.silu(gate_BSF) * up_BSF, self.w2_FD.T)
        return y_BSD if self.b2_D is None else y_BSD + self.b2_D.to(y_BSD.dtype)
