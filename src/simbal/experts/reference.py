"""Backend `reference`: a plain loop over experts, any dtype, gradients by autograd.

Shapes: N tokens, D model width, E experts, F expert hidden width, R routed rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from simbal.experts.plan import RoutingPlan


def reference(x_ND: Tensor, plan: RoutingPlan, w13_E2FD: Tensor, w2_EFD: Tensor) -> Tensor:
    """y_t = sum_k p_tk W2_e^T (silu(Wgate_e x_t) * (Wup_e x_t)) with e the k-th expert of token t."""
    y_ND = torch.zeros_like(x_ND)
    p_R = plan.weights_NK.reshape(-1)[plan.order_R].to(x_ND.dtype)
    begin = 0
    # unbind: indexing w[e] in a loop would build a zero gradient of the whole stack for every expert
    for end, w13_2FD, w2_FD in zip(plan.ends_E.tolist(), w13_E2FD.unbind(), w2_EFD.unbind(), strict=True):
        token = plan.tokens_R[begin:end]
        gate, up = (x_ND[token] @ w.T for w in w13_2FD)
        y_ND = y_ND.index_add(0, token, (F.silu(gate) * up) @ w2_FD * p_R[begin:end, None])
        begin = end
    return y_ND
