"""Finds the routers of a Hugging Face MoE, and what rule each follows.

In transformers 5 a block of experts has two parts: a router, which returns for N tokens the logits (N, E), the weights
of the chosen experts (N, K) and their indices (N, K); and `experts`, which take the tokens, these indices and these
weights.
Shapes: N tokens, D model width, E experts, K experts per token.
"""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simbal.errors import UserError
from simbal.host.probe import probe
from simbal.host.rules import Rule

NAMES = ("gate", "router")  # of routers in their blocks
BIASES = ("e_score_correction_bias", "expert_bias")  # on the choice; in a router or in its block
KNOWN = "Mixtral, OLMoE, Qwen-MoE, DeepSeek-V2 and V3, GPT-OSS, Granite-MoE, Phi-3.5-MoE and those of their shape"
COPIES = "modules_to_save"  # the child of peft's wrapper that holds the trained copies of a module


@dataclass(frozen=True)
class HostRouter:
    """A router of a host model, with the attributes of simbal's `Router`."""

    name: str
    module: nn.Module
    experts: nn.Module
    layer: int
    top_k: int
    rule: Rule
    weight_name: str
    bias_at: tuple[nn.Module, str] | None  # the module that holds the model's bias on the choice, and its name there

    @property
    def weight_ED(self) -> Tensor:
        """The parameter of the host's router, (E, D)."""
        return self.module.get_parameter(self.weight_name)

    @property
    def bias(self) -> Tensor | None:
        """The bias on the choice, of E elements; looked up anew, as a model that moves makes new buffers."""
        if self.bias_at is None:
            return None
        owner, name = self.bias_at
        bias: Tensor = getattr(owner, name)
        return bias

    @property
    def bias_E(self) -> Tensor | None:
        """The bias on the choice, (E,), as it is now."""
        return None if self.bias is None else self.bias.view(-1)

    @property
    def gating(self) -> str:
        """The gating: softmax or sigmoid."""
        return self.rule.gating

    @property
    def renormalize(self) -> bool:
        """Whether the weights of a token's experts are divided by their sum."""
        return self.rule.renormalize


def find_routers(model: nn.Module) -> list[HostRouter]:
    """Return every router of `model`, first layer first.

    Raises:
        UserError: there is none, one follows no rule that is known, or they differ in shape or rule.
    """
    idle = _idle(model)
    blocks = [
        (f"{name}.{child}", _running(getattr(block, child)), block)
        for name, block in model.named_modules()
        for child in NAMES
        if block not in idle
        and isinstance(getattr(block, "experts", None), nn.Module)
        and isinstance(getattr(block, child, None), nn.Module)
    ]
    if not blocks:
        raise UserError(f"{type(model).__name__} has no router that simbal knows: it knows those of {KNOWN}")
    routers = [_router(name, module, block, layer) for layer, (name, module, block) in enumerate(blocks)]
    facts = {(len(router.weight_ED), router.top_k, router.rule) for router in routers}
    if len(facts) > 1:
        raise UserError(f"the routers of {type(model).__name__} differ in number of experts, top_k or rule")
    return routers


def _running(module: nn.Module) -> nn.Module:
    """Return what runs in the place of `module`: the active copy of a module that peft trains as a whole."""
    copies = module._modules.get(COPIES)
    if copies is None:
        return module
    active: Any = module  # peft's ModulesToSaveWrapper
    running: nn.Module = (
        active.original_module if active.disable_adapters else active.modules_to_save[active.active_adapters[0]]
    )
    return running


def _idle(model: nn.Module) -> set[nn.Module]:
    """Return peft's wrappers of modules that it trains as a whole, and what is in those copies that do not run."""
    idle: set[nn.Module] = set()
    for wrapper in model.modules():
        if COPIES in wrapper._modules:
            running = set(_running(wrapper).modules())
            idle |= set(wrapper.modules()) - running
    return idle


def _router(name: str, module: nn.Module, block: nn.Module, layer: int) -> HostRouter:
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise UserError(f"the weight of {name} is sharded over processes, and the whole of it is needed in each")
    if "lora_A" in module._modules:
        raise UserError(
            f"{name} is under LoRA, whose update is no part of its weight: train routers as a whole, by "
            f"LoraConfig(modules_to_save=['{name.rpartition('.')[2]}'])"
        )
    sizes = {key: parameter.shape for key, parameter in module.named_parameters()}
    matrices = [key for key, shape in sizes.items() if len(shape) == 2 and min(shape) > 1]
    if len(matrices) != 1:
        raise UserError(f"{name} is a {type(module).__name__} with {len(matrices)} matrices, where a router has one")
    bias_at = _choice_bias(module, block)
    found = probe(module, matrices[0], getattr(*bias_at) if bias_at else None)
    if found is None:
        raise UserError(
            f"{name} is a {type(module).__name__}, which follows none of the rules in simbal.host.rules.RULES: its "
            "own can be added there"
        )
    rule, top_k = found
    experts, on_choice = block.get_submodule("experts"), bias_at if rule.biased else None
    return HostRouter(name, module, experts, layer, top_k, rule, matrices[0], on_choice)


def _choice_bias(module: nn.Module, block: nn.Module) -> tuple[nn.Module, str] | None:
    """Return where the bias on the choice of experts is, a buffer or parameter of the router or of its block."""
    for owner in (*module.modules(), *block.modules()):
        for name, _ in [*owner.named_buffers(recurse=False), *owner.named_parameters(recurse=False)]:
            if name in BIASES:
                return owner, name
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
