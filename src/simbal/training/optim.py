"""AdamW and its learning rate: linear warm-up from a tenth of the peak, cosine back to a tenth.

Reference: arXiv 2506.14038, section 3.2; the cosine's end and the parameters that decay are not stated there.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True)
class OptimSettings:
    """The optimizer's numbers; `lr` is the peak."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    decay_router: bool
    warmup_steps: int


def lr_factor(step: int, warmup_steps: int, max_steps: int) -> float:
    """Share of the peak at `step` s of T, with W warm-up steps.

    0.1 + 0.9 s/W for s < W, then 0.1 + 0.45 (1 + cos(pi (s - W) / (T - W))); 0.1 from T on. A run with T <= W ends
    while the rate still rises.
    """
    if step < warmup_steps:
        return 0.1 + 0.9 * step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def parameter_groups(model: nn.Module, settings: OptimSettings) -> list[dict[str, object]]:
    """Matrices decay, norm gains do not, routers as `decay_router` says, but never what parametrises a router."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        path = name.split(".")
        # decay would shrink the signs that torch keeps on the diagonal of an orthogonal parametrization, to 0
        decays = (
            parameter.ndim > 1 and (settings.decay_router or "router" not in path) and "parametrizations" not in path
        )
        (decayed if decays else plain).append(parameter)
    return [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


def build_optimizer(
    model: nn.Module, settings: OptimSettings, max_steps: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """The optimizer and the schedule that sets its rate at each step."""
    groups = parameter_groups(model, settings)
    optimizer = torch.optim.AdamW(groups, settings.lr, settings.betas, settings.eps, fused=True)
    return optimizer, LambdaLR(optimizer, lambda step: lr_factor(step, settings.warmup_steps, max_steps))
