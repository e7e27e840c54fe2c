"""The optimizer: its parameter groups, the schedule of its learning rate, and their scaling with width (muP).

Reference: muP: Yang et al. 2022 (arXiv 2203.03466), tables 3 and 8.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from simbal.balancing.orthogonal import Mixture
from simbal.config.schema import OptimConfig
from simbal.model.moe import BIASES
from simbal.training.muon import Muon


def lr_factor(
    step: int, warmup_steps: int, max_steps: int, schedule: str = "cosine", decay_fraction: float = 1.0
) -> float:
    """Return the learning rate of a step as a fraction of its peak.

    With step s, W warm-up steps and T total steps, the factor is 0.1 + 0.9 s/W for s < W. With p = (s - W) / (T - W),
    at most 1, it is then

        cosine    0.1 + 0.45 (1 + cos(pi p))
        linear    1 - p (Bergsma et al. 2025, arXiv 2502.15938)
        wsd       1 for s < (1 - decay_fraction) T, then 1 - sqrt(p), where p runs over the remaining steps (warm-up,
                  stable, decay; Hägele et al. 2024, arXiv 2405.18392)
        constant  1
    """
    if step < warmup_steps:
        return 0.1 + 0.9 * step / warmup_steps
    start = max(warmup_steps, (1 - decay_fraction) * max_steps) if schedule == "wsd" else warmup_steps
    progress = max(0.0, min(1.0, (step - start) / max(1, max_steps - start)))
    if schedule == "cosine":
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
    return {"linear": 1 - progress, "wsd": 1 - math.sqrt(progress), "constant": 1.0}[schedule]


class Kind(NamedTuple):
    """How a parameter is trained. The parameters of one kind form a group of the optimizer."""

    decays: bool
    lr_scale: float  # learning rate relative to `optim.lr`
    eps_scale: float  # epsilon relative to `optim.eps`
    muon: bool = False
    rows: tuple[int, ...] | None = None  # as in `Muon`


def kind_of(model: Any, name: str, parameter: nn.Parameter, optim: OptimConfig, width_ratio: float) -> Kind:
    """Return how the parameter `name` of a model is trained.

    Weight decay applies to matrices, not to norm gains and biases, and to routers only if `decay_router`. It never
    applies to the Householder vectors of an orthogonal parametrization: torch stores signs on their diagonal, which
    weight decay would shrink to 0. Muon updates no parametrization.

    muP assumes that d_expert grows with d_model. AdamW's learning rate is proportional to 1 / width for a matrix whose
    input grows with the width, so not for the embedding, token tables, gains, biases and a `Mixture`. Muon's is
    proportional to 1 / sqrt(width), and for a router, with its fixed number of outputs, to 1 / width. Epsilon follows
    the gradient, which is proportional to 1 / width except for head and router.
    """
    path = name.split(".")
    is_matrix, is_router = parameter.ndim > 1 and path[-1] not in BIASES, "router" in path
    is_plain, is_lookup = "parametrizations" not in path, not {"embedding", "token_table"}.isdisjoint(path)
    is_mixture = not is_plain and isinstance(model.get_submodule(".".join([*path[:-1], "0"])), Mixture)
    decays = is_matrix and (optim.decay_router or not is_router) and (is_plain or is_mixture)
    eps_scale = 1.0 if is_router or path[-1] == "head_VD" else width_ratio
    by_muon = optim.algorithm == "muon" and is_matrix and is_plain and "blocks" in path and not is_lookup
    if by_muon and (optim.muon_router or not is_router):
        rows = tuple(model.get_submodule(".".join(path[:-2])).widths) if "qkv" in path else None
        return Kind(decays, width_ratio if is_router else math.sqrt(width_ratio), eps_scale, True, rows)
    scaled = is_matrix and not is_lookup and not is_mixture
    return Kind(decays, width_ratio if scaled else 1.0, eps_scale)


def mup_width_ratio(optim: OptimConfig, d_model: int) -> float:
    """Return the base width divided by the model's width, which scales initialization and rates; 1 without muP."""
    return optim.mup_base_width / d_model if optim.mup else 1.0


def parameter_groups(model: Any, optim: OptimConfig) -> list[dict[str, Any]]:
    """Return the trained parameters in groups; AdamW without muP has two, with weight decay and without.

    The first group includes the embedding and has the learning rate `optim.lr`. lr * weight_decay does not depend on
    the width, as in microsoft/mup.
    """
    ratio = mup_width_ratio(optim, model.shape.d_model) if optim.mup else 1.0
    kinds: dict[Kind, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kinds.setdefault(kind_of(model, name, parameter, optim, ratio), []).append(parameter)
    groups = []
    for kind in sorted(kinds, key=lambda kind: (not kind.decays, kind.lr_scale != 1.0)):
        group: dict[str, Any] = {
            "params": kinds[kind],
            "lr": optim.lr * kind.lr_scale,
            "eps": optim.eps * kind.eps_scale,
            "weight_decay": optim.weight_decay / kind.lr_scale if kind.decays else 0.0,
        }
        groups.append(group | {"momentum": optim.momentum, "rows": kind.rows} if kind.muon else group)
    return groups


def build_optimizer(model: nn.Module, optim: OptimConfig, max_steps: int) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Return the optimizer and the scheduler of its learning rate, which steps once per optimizer step."""
    beta1, beta2 = optim.betas
    algorithm = Muon if optim.algorithm == "muon" else torch.optim.AdamW
    optimizer = algorithm(parameter_groups(model, optim), betas=(beta1, beta2), fused=True)
    schedule = (optim.warmup_steps, max_steps, optim.schedule, optim.decay_fraction)
    return optimizer, LambdaLR(optimizer, lambda step: lr_factor(step, *schedule))
