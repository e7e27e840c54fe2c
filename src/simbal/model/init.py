"""Weight initialization.

Routers and shared experts have their own random generators, so neither a strategy nor the number of shared experts
changes any other initial weight. Token tables start at 0.
Reference: router initialization: arXiv 2506.14038, section 3.1 (orthogonal for SimBal); the paper does not state the
other initializations.
Shapes: E experts, D model width.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from simbal.errors import UserError
from simbal.model.moe import BIASES
from simbal.model.transformer import Transformer


def generator(seed: int, stream: str) -> torch.Generator:
    """Return a CPU random generator that depends only on (seed, stream)."""
    digest = hashlib.sha256(f"{seed}/{stream}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@torch.no_grad()
def initialize(
    model: Transformer, seed: int, std: float, router_init: str | Sequence[str], width_ratio: float = 1.0
) -> None:
    """Initialize biases to 0, routers with `init_router`, and matrices with N(0, std^2) truncated at 3 std.

    `router_init` is a kind of initialization, or one per layer.
    `width_ratio` is the base width divided by the model's width (muP; Yang et al. 2022, arXiv 2203.03466, table 3). The
    embedding keeps std. Hidden matrices have std * width_ratio^(1/2). The head has std * width_ratio, and so has a
    router with `router_init=normal`, because both map to a fixed number of logits.
    """
    head = None if model.shape.tie_embeddings else model.head_VD
    routers = {id(router.weight_ED) for router in model.routers}
    weights, shared = generator(seed, "weights"), generator(seed, "shared experts")
    for name, parameter in model.named_parameters():
        source = shared if "shared" in name.split(".") else weights
        if name.rpartition(".")[2] in BIASES or name.endswith("token_table.weight"):
            parameter.zero_()
        elif parameter.ndim > 1 and id(parameter) not in routers:
            power = 0.0 if parameter is model.embedding.weight else 1.0 if parameter is head else 0.5
            spread = std * width_ratio**power
            nn.init.trunc_normal_(parameter, std=spread, a=-3 * spread, b=3 * spread, generator=source)
    router_weights = generator(seed, "router")
    kinds = [router_init] * len(model.routers) if isinstance(router_init, str) else router_init
    for router, kind in zip(model.routers, kinds, strict=True):
        init_router(router.weight_ED, kind, std * width_ratio, router_weights)


@torch.no_grad()
def init_router(weight_ED: Tensor, kind: str, std: float, generator: torch.Generator) -> None:
    """Initialize a router's weight.

    `kind` is orthogonal (orthonormal rows), normal (N(0, std^2)) or normal_unit (N(0, 1/D): rows of length about 1).

    Raises:
        UserError: orthogonal with E > D, or an unknown `kind`.
    """
    num_experts, d_model = weight_ED.shape
    if kind == "orthogonal":
        if num_experts > d_model:
            raise UserError(
                f"model.num_experts={num_experts} rows cannot be orthogonal in model.d_model={d_model} dimensions: "
                f"use at most {d_model} experts, or router.init=normal"
            )
        # in fp32, because the QR decomposition does not support bf16
        weight_ED.copy_(nn.init.orthogonal_(torch.empty(num_experts, d_model), generator=generator))
    elif kind in ("normal", "normal_unit"):
        weight_ED.normal_(0, std if kind == "normal" else d_model**-0.5, generator=generator)
    else:
        raise UserError(f"router.init={kind} is not one of auto, orthogonal, normal, normal_unit")
