"""Initialises the weights; the routers' come from a generator of their own, so no strategy can shift any other weight.

So do those of shared experts, without which all others are the same.

Reference: router starts in arXiv 2506.14038, section 3.1 (orthogonal for SimBal); the rest is not stated there.
Shapes: E experts, D model width.
"""

import hashlib

import torch
from torch import Tensor, nn

from simbal.errors import UserError
from simbal.model.moe import BIASES
from simbal.model.transformer import Transformer


def generator(seed: int, stream: str) -> torch.Generator:
    """Return a CPU generator whose numbers depend on (seed, stream) alone."""
    digest = hashlib.sha256(f"{seed}/{stream}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@torch.no_grad()
def initialise(model: Transformer, seed: int, std: float, router_init: str) -> None:
    """Set biases to 0, routers as `init_router` does, and matrices to normal with `std`, truncated at 3 std."""
    routers = {id(router.weight_ED) for router in model.routers}
    weights, of_shared = generator(seed, "weights"), generator(seed, "shared experts")
    for name, parameter in model.named_parameters():
        source = of_shared if "shared" in name.split(".") else weights
        if name.rpartition(".")[2] in BIASES:
            parameter.zero_()
        elif parameter.ndim > 1 and id(parameter) not in routers:
            nn.init.trunc_normal_(parameter, std=std, a=-3 * std, b=3 * std, generator=source)
    router_weights = generator(seed, "router")
    for router in model.routers:
        init_router(router.weight_ED, router_init, std, router_weights)


@torch.no_grad()
def init_router(weight_ED: Tensor, kind: str, std: float, generator: torch.Generator) -> None:
    """Set a router's weight by `kind`.

    orthogonal: orthonormal rows; normal: N(0, std^2); normal_unit: N(0, 1/D), rows of about unit length.

    Raises:
        UserError: E orthonormal rows do not fit into D dimensions, or `kind` is unknown.
    """
    num_experts, d_model = weight_ED.shape
    if kind == "orthogonal":
        if num_experts > d_model:
            raise UserError(
                f"model.num_experts={num_experts} rows cannot be orthogonal in model.d_model={d_model} dimensions: "
                f"use at most {d_model} experts, or router.init=normal"
            )
        # in fp32: the QR decomposition has no bf16 kernel
        weight_ED.copy_(nn.init.orthogonal_(torch.empty(num_experts, d_model), generator=generator))
    elif kind in ("normal", "normal_unit"):
        weight_ED.normal_(0, std if kind == "normal" else d_model**-0.5, generator=generator)
    else:
        raise UserError(f"router.init={kind} is not one of auto, orthogonal, normal, normal_unit")
