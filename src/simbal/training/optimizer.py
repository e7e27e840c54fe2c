"""The optimizer, AdamW: its learning-rate schedule, and which parameters decay."""

import math
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from simbal.balancing.orthogonal import Mixture
from simbal.config.schema import OptimConfig
from simbal.model.moe import BIASES


def lr_factor(step: int, warmup_steps: int, max_steps: int) -> float:
    """Return the learning rate at `step` s of T as a share of its peak, with W warm-up steps.

    It is 0.1 + 0.9 s/W for s < W, then 0.1 + 0.45 (1 + cos(pi (s - W) / (T - W))), and 0.1 from T on. A run with
    T <= W ends while the rate still rises.
    """
    if step < warmup_steps:
        return 0.1 + 0.9 * step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, object]]:
    """Return AdamW's two groups, of what is trained: what decays, and what does not.

    Matrices decay, norm gains and biases do not, and routers do if `decay_router`, but never the vectors of Householder
    reflections: decay would shrink the signs that torch keeps on their diagonal, to 0.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        path = name.split(".")
        decays = parameter.ndim > 1 and (optim.decay_router or "router" not in path)
        decays &= path[-1] not in BIASES
        if "parametrizations" in path:
            computed: Any = model.get_submodule(".".join(path[:-1]))
            decays &= isinstance(computed[0], Mixture)
        if parameter.requires_grad:
            (decayed if decays else plain).append(parameter)
    return [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]


def build_optimizer(model: nn.Module, optim: OptimConfig, max_steps: int) -> tuple[torch.optim.AdamW, LambdaLR]:
    """Return the optimizer, and the schedule that sets its rate at each of `max_steps` steps."""
    first, second = optim.betas
    groups = parameter_groups(model, optim)
    optimizer = torch.optim.AdamW(groups, optim.lr, (first, second), optim.eps, fused=True)
    return optimizer, LambdaLR(optimizer, lambda step: lr_factor(step, optim.warmup_steps, max_steps))
