"""Run every C kernel under -fsanitize=address,undefined, with sizes that are not multiples of a vector."""

import torch

from simbal.experts.backends import RoutingPlan
from simbal.experts.native import native
from simbal.model.attention import rotary_angles
from simbal.model.head import head_loss
from simbal.model.native import attention
from simbal.native import library

library.FLAGS = ("-O1", "-g", *library.FLAGS[1:], "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def run_experts(N: int, D: int, F: int, E: int, K: int) -> None:
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((N, D), (N, K), (E, 2, F, D), (E, F, D))]
    x, p, w13, w2 = leaves
    logits_NE = torch.randn(N, E)
    logits_NE[:, 0] -= 40 * (K < E)  # an expert without rows
    plan = RoutingPlan.build(logits_NE.topk(K).indices, p, E)
    torch.autograd.grad(native(x, plan, w13, w2).sum(), leaves)


def run_attention(B: int, S: int, heads: int, kv_heads: int, width: int) -> None:
    qkv_BSQ = torch.randn(B, S, (heads + 2 * kv_heads) * width, requires_grad=True)
    attention(qkv_BSQ, rotary_angles(S, width, 1e4, torch.device("cpu")), heads, width).sum().backward()


def run_head(N: int, V: int) -> None:
    x_ND, weight_VD = torch.randn(N, 4, requires_grad=True), torch.randn(V, 4, requires_grad=True)
    head_loss(x_ND, weight_VD, torch.randint(V, (N,)), 0.1, "native").loss.backward()


if __name__ == "__main__":
    for sizes in ((1, 1, 1, 1, 1), (7, 5, 3, 4, 2), (50, 33, 17, 6, 3), (40, 128, 64, 5, 2)):
        run_experts(*sizes)
    for sizes in ((1, 1, 1, 1, 2), (2, 7, 4, 2, 6), (1, 70, 2, 1, 10), (2, 64, 2, 2, 32)):
        run_attention(*sizes)
    for N, V in ((1, 1), (5, 37), (3, 64)):
        run_head(N, V)
    print("all kernels ran")
