"""Muon: momentum orthogonalized by a Newton-Schulz iteration, for all experts of a layer at once.

Reference: Jordan et al. 2024 (kellerjordan.github.io/posts/muon); step size: Liu et al. 2025 (arXiv 2502.16982);
torch.optim.Muon, which accepts single matrices only.
Shapes: M matrices of R rows and C columns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz polynomial a x + b x^3 + c x^5
ITERATIONS = 5
SMALLEST_NORM = 1e-7


def orthogonalize(x_MRC: Tensor) -> Tensor:
    """Return each matrix with its singular values moved to about 1 (between 0.5 and 1.5), in bf16 on CUDA."""
    a, b, c = COEFFICIENTS
    dtype = torch.bfloat16 if x_MRC.is_cuda else torch.promote_types(x_MRC.dtype, torch.float32)
    tall = x_MRC.shape[1] > x_MRC.shape[2]
    y_MRC = (x_MRC.mT if tall else x_MRC).to(dtype)
    y_MRC = y_MRC / torch.linalg.matrix_norm(y_MRC, keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram_MRR = y_MRC @ y_MRC.mT
        polynomial_MRR = torch.baddbmm(gram_MRR, gram_MRR, gram_MRR, beta=b, alpha=c)
        y_MRC = torch.baddbmm(y_MRC, polynomial_MRR, y_MRC, beta=a)
    return y_MRC.mT if tall else y_MRC


class Muon(torch.optim.AdamW):
    """Muon for the groups with a key `momentum`, AdamW for the others, in one optimizer with one state.

    With gradient g, momentum B and decay rate mu: B = mu B + (1 - mu) g, then W -= lr (0.2 sqrt(max(R, C)) O + decay W)
    with O = orthogonalize((1 - mu) g + mu B), per matrix. The factor gives updates the size of AdamW's, so both share
    one learning rate.

    A parameter is a stack of matrices: w13 (E, 2, F, D) is 2E matrices, because gate and up are separate linear maps
    that read the same input, and w2 (E, F, D) is E. `rows` of a group divides its matrices further, into queries, keys
    and values; None: it does not.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters with a gradient, and return what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if "momentum" not in group]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if "momentum" in group:
                self._orthogonal_step(group)
        return loss

    def _orthogonal_step(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
                state["step"] = torch.zeros(())  # unused, but AdamW expects it when it loads a state
            state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            update_MRC = matrices(gradient.lerp(state["momentum_buffer"], group["momentum"]))
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            rows = group["rows"] or [update_MRC.shape[1]]
            for part_MRC, step_MRC in zip(matrices(parameter).split(rows, 1), update_MRC.split(rows, 1), strict=True):
                scale = 0.2 * max(part_MRC.shape[1:]) ** 0.5
                part_MRC.add_(orthogonalize(step_MRC), alpha=-group["lr"] * scale)


def matrices(stacked: Tensor) -> Tensor:
    """Return a view of the matrices that a parameter stacks along all but its last two dimensions, (M, R, C)."""
    return stacked.view(-1, *stacked.shape[-2:])
