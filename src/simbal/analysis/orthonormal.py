"""Three ways to bf16 routers with orthonormal rows, for many trials at once.

Reference: arXiv 2506.14038, section 4.1 and table 2. It does not say where Trained starts, nor AdamW's betas.
Shapes: T trials, E experts, D model width.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from simbal.metrics.orthogonality import identity_deviation


def ortho_init(num_experts: int, d_model: int, generators: Sequence[torch.Generator]) -> Tensor:
    """OrthoInit, (T, E, D): drawn in fp32, as the QR decomposition has no bf16 kernel, then cast."""
    routers = [nn.init.orthogonal_(torch.empty(num_experts, d_model), generator=g) for g in generators]
    return torch.stack(routers).bfloat16()


def parametrized(num_experts: int, d_model: int, generators: Sequence[torch.Generator]) -> Tensor:
    """Param, (T, E, D): an fp32 weight as nn.Linear starts it, made orthonormal by torch's parametrization, then cast.

    Those uniform weights stay nearly uniform, and lose a little more in bf16 than OrthoInit's nearly normal ones.
    The trivialization, which is torch's default, would first complete each router to a basis of D rows: the same rows
    up to the rounding of fp32, a hundred times slower.
    """
    bound = d_model**-0.5
    weights = [torch.empty(num_experts, d_model).uniform_(-bound, bound, generator=g) for g in generators]
    routers = nn.Module()
    routers.register_parameter("weight", nn.Parameter(torch.stack(weights)))
    parametrizations.orthogonal(routers, use_trivialization=False)
    with torch.no_grad():
        return cast(Tensor, routers.weight).bfloat16()


def trained(start_TED: Tensor, steps: int, lr: float, final_lr: float) -> Tensor:
    """Trained, (T, E, D): SimBal's loss sum_ij |W W^T - I|_ij alone, in bf16, minimised by AdamW without decay.

    AdamW is elementwise and no trial enters another's loss, so that each trial ends where it would end alone.
    """
    weight_TED = nn.Parameter(start_TED.clone())
    optimizer = torch.optim.AdamW([weight_TED], lr=lr, weight_decay=0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=final_lr)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(identity_deviation(weight_TED, torch.bfloat16).abs().sum())
        optimizer.step()
        schedule.step()
    return weight_TED.detach()
