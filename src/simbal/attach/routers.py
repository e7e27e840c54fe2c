"""Finds the routers of a Hugging Face MoE, and checks that they compute what is assumed of them.

In transformers 5 those of Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE are modules that return, for N tokens, the logits
(N, E), the weights of the chosen experts (N, K) and their indices (N, K).
Shapes: N tokens, D model width, E experts, K experts per token.
"""

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from simbal.errors import UserError

CLASS_SUFFIX = "TopKRouter"  # of the class names
KNOWN = "Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE"
PROBE_TOKENS = 16


@dataclass(frozen=True)
class HostRouter:
    """A router of a host model, with the attributes of simbal's `Router`."""

    name: str
    module: nn.Module
    layer: int
    top_k: int
    renormalize: bool
    gating: str = "softmax"

    @property
    def weight_ED(self) -> Tensor:
        """The parameter of the host's router, (E, D)."""
        weight_ED = self.module.weight
        assert isinstance(weight_ED, Tensor)
        return weight_ED


def find_routers(model: nn.Module) -> list[HostRouter]:
    """Return every router of `model`, first layer first.

    Raises:
        UserError: there is none, one computes something else, or they cannot be balanced together.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module).__name__.endswith(CLASS_SUFFIX)]
    if not found:
        raise UserError(f"{type(model).__name__} has no router that attach knows: it knows those of {KNOWN}")
    routers = [_router(name, module, layer) for layer, (name, module) in enumerate(found)]
    facts = {(len(router.weight_ED), router.top_k, router.weight_ED.device) for router in routers}
    if len(facts) > 1:
        raise UserError(f"the routers of {type(model).__name__} differ in number of experts, top_k or device")
    return routers


def _router(name: str, module: nn.Module, layer: int) -> HostRouter:
    weight_ED, top_k = getattr(module, "weight", None), getattr(module, "top_k", None)
    if isinstance(weight_ED, DTensor):
        raise UserError(f"the weight of {name} is sharded over processes, and attach needs the whole of it in each")
    tensors = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    # a bias that is 0 as yet would pass the probe
    if tensors == ["weight"] and weight_ED is not None and weight_ED.dim() == 2 and isinstance(top_k, int):
        renormalize = renormalizes(module, weight_ED.shape, top_k)
        if renormalize is not None:
            return HostRouter(name, module, layer, top_k, renormalize)
    raise UserError(
        f"{name} is a {type(module).__name__}, which does not choose the K largest of softmax(x W^T): attach knows "
        f"the routers of {KNOWN}"
    )


@torch.no_grad()
def renormalizes(module: nn.Module, shape: torch.Size, top_k: int) -> bool | None:
    """Return whether its K weights are divided by their sum; None if it is no softmax router at all.

    The router is run, with random numbers in place of its weight: names of classes and config keys have changed their
    meaning between versions of transformers before.
    """
    num_experts, d_model = shape
    generator = torch.Generator().manual_seed(0)
    weight_ED = torch.randn(num_experts, d_model, generator=generator) / d_model**0.5
    x_ND = torch.randn(PROBE_TOKENS, d_model, generator=generator)
    try:
        logits_NE, weights_NK, experts_NK = functional_call(module, {"weight": weight_ED}, (x_ND,))
    except (RuntimeError, TypeError, ValueError):  # another signature or another result
        return None
    expected_NE = x_ND @ weight_ED.T
    probs_NE = expected_NE.softmax(-1)
    largest_NK = probs_NE.topk(top_k).values
    for renormalize in (True, False):
        expected_NK = largest_NK / largest_NK.sum(-1, keepdim=True) if renormalize else largest_NK
        pairs = [(logits_NE, expected_NE), (weights_NK, expected_NK), (probs_NE.gather(1, experts_NK), largest_NK)]
        if all(a.shape == b.shape and torch.allclose(a.to(b), b, rtol=1e-4, atol=1e-6) for a, b in pairs):
            return renormalize
    return None


def find_backbone(model: nn.Module, routers: list[HostRouter]) -> nn.Module:
    """Return the innermost module that takes `input_ids` and holds all routers; all wrappers lead to it.

    Raises:
        UserError: there is none.
    """
    wanted = {router.module for router in routers}
    takers = [
        module
        for module in model.modules()
        if "input_ids" in inspect.signature(module.forward).parameters and wanted <= set(module.modules())
    ]
    if not takers:
        raise UserError(f"{type(model).__name__} has no part that takes input_ids and holds all its routers")
    return takers[-1]  # modules() lists the outer one first
