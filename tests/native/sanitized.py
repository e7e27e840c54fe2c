"""Run every C kernel under -fsanitize=address,undefined, with sizes that are not multiples of a vector."""

import torch

from simbal.experts.backends import RoutingPlan
from simbal.experts.native import native
from simbal.native import library

library.FLAGS = ("-O1", "-g", *library.FLAGS[1:], "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def run_experts(N: int, D: int, F: int, E: int, K: int) -> None:
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((N, D), (N, K), (E, 2, F, D), (E, F, D))]
    x, p, w13, w2 = leaves
    logits_NE = torch.randn(N, E)
    logits_NE[:, 0] -= 40 * (K < E)  # an expert without rows
    plan = RoutingPlan.build(logits_NE.topk(K).indices, p, E)
    torch.autograd.grad(native(x, plan, w13, w2).sum(), leaves)


if __name__ == "__main__":
    for sizes in ((1, 1, 1, 1, 1), (7, 5, 3, 4, 2), (50, 33, 17, 6, 3), (40, 128, 64, 5, 2)):
        run_experts(*sizes)
    print("all kernels ran")
