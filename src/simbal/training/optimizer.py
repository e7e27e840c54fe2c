"""AdamW with its learning-rate schedule and its parameter groups."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from simbal.balancing.orthogonal import Mixture
from simbal.config.schema import OptimConfig
from simbal.model.moe import BIASES


def lr_factor(step: int, warmup_steps: int, max_steps: int) -> float:
    """Return the learning rate of a step as a fraction of its peak: linear warm-up from 0.1, cosine decay to 0.1.

    With step s, W warm-up steps and T total steps, the factor is 0.1 + 0.9 s/W for s < W, then
    0.1 + 0.45 (1 + cos(pi (s - W) / (T - W))), and 0.1 from T on.
    """
    if step < warmup_steps:
        return 0.1 + 0.9 * step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, object]]:
    """Return the trained parameters in two groups: with weight decay, and without.

    Weight decay applies to matrices, not to norm gains and biases, and to routers only if `decay_router`. It never
    applies to the Householder vectors of an orthogonal parametrization: torch stores signs on their diagonal, which
    weight decay would shrink to 0.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        path = name.split(".")
        decays = parameter.ndim > 1 and path[-1] not in BIASES and (optim.decay_router or "router" not in path)
        if "parametrizations" in path:
            parametrization = model.get_submodule(".".join([*path[:-1], "0"]))
            decays = decays and isinstance(parametrization, Mixture)
        (decayed if decays else plain).append(parameter)
    return [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]


def build_optimizer(model: nn.Module, optim: OptimConfig, max_steps: int) -> tuple[torch.optim.AdamW, LambdaLR]:
    """Return the optimizer and the scheduler of its learning rate, which steps once per optimizer step."""
    beta1, beta2 = optim.betas
    groups = parameter_groups(model, optim)
    optimizer = torch.optim.AdamW(groups, optim.lr, (beta1, beta2), optim.eps, fused=True)
    return optimizer, LambdaLR(optimizer, lambda step: lr_factor(step, optim.warmup_steps, max_steps))
