"""Finds the routers of a Hugging Face MoE, and what rule each follows.

In transformers 5 a block of experts has two parts: a router, which returns for N tokens the logits (N, E), the weights
of the chosen experts (N, K) and their indices (N, K); and `experts`, which take the tokens, these indices and these
weights.
Shapes: N tokens, D model width, E experts, K experts per token.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from simbal.errors import UserError
from simbal.host.rules import RULES, Rule

NAMES = ("gate", "router")  # of routers in their blocks
BIASES = ("e_score_correction_bias", "expert_bias")  # on the choice; in a router or in its block
KNOWN = "Mixtral, OLMoE, Qwen-MoE, DeepSeek-V2 and V3, GPT-OSS, Granite-MoE, Phi-3.5-MoE and those of their shape"
COPIES = "modules_to_save"  # the child of peft's wrapper that holds the trained copies of a module
PROBE_TOKENS = 64


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


@torch.no_grad()
def probe(module: nn.Module, weight_name: str, bias: Tensor | None) -> tuple[Rule, int] | None:
    """Return the rule that a router follows, and its K; None if it follows none of `RULES`.

    The router is run in evaluation, with random numbers in the place of its parameters and of the bias on its choice,
    as a bias that is 0 as yet would show nothing. Rules that decide alike but differ in gating count as none.
    """
    trial = Trial.of(module, weight_name, bias)
    output = trial.run(module)
    if output is None:
        return None
    logits_NE, weights_NK, experts_NK = output
    if not _alike(logits_NE, trial.logits_NE):
        return None
    theirs_NE = torch.zeros_like(trial.logits_NE).scatter(1, experts_NK, weights_NK)
    fits = []
    for rule in (rule for kind in RULES for rule in kind.candidates(module, bias is not None)):
        chosen_NK, given_NK = rule.decide(trial.logits_NE, experts_NK.shape[1], trial.bias_E if rule.biased else None)
        ours_NE = torch.zeros_like(theirs_NE).scatter(1, chosen_NK, given_NK)
        if torch.equal(chosen_NK.sort().values, experts_NK.sort().values) and _alike(ours_NE, theirs_NE):
            fits.append(rule)
    return (fits[0], experts_NK.shape[1]) if len({rule.gating for rule in fits}) == 1 else None


@dataclass(frozen=True)
class Trial:
    """Random numbers for a router: tokens, parameters by name, and a bias on the choice; all fp32."""

    x_ND: Tensor
    tensors: dict[str, Tensor]
    bias_E: Tensor
    logits_NE: Tensor  # that are expected

    @classmethod
    def of(cls, module: nn.Module, weight_name: str, bias: Tensor | None) -> Self:
        """Return a trial of `module`, on its device; what it holds beside a weight are biases of its logits."""
        weight_ED = module.get_parameter(weight_name)
        device = "cpu" if weight_ED.is_meta else weight_ED.device
        draws = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draws).to(device)

        num_experts, d_model = weight_ED.shape
        x_ND, bias_E = normal(PROBE_TOKENS, d_model), normal(num_experts) / 10
        held = [*module.named_parameters(), *module.named_buffers()]
        on_choice = {name: bias_E.view_as(tensor) for name, tensor in held if tensor is bias}
        random = {name: normal(*tensor.shape) / 10 for name, tensor in module.named_parameters()}
        random[weight_name] = normal(num_experts, d_model) / d_model**0.5
        logits_NE = x_ND @ random[weight_name].T
        for name, tensor in random.items():
            if name not in on_choice and tensor.shape == (num_experts,):
                logits_NE = logits_NE + tensor
        return cls(x_ND, random | on_choice, bias_E, logits_NE)

    def run(self, module: nn.Module) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the router's logits (N, E), weights and experts (N, K); None if it does not return such."""
        tensors = {f"module.{name}": tensor for name, tensor in self.tensors.items()}
        more = len(inspect.signature(module.forward).parameters) - 1  # of these it takes the bias from its block
        for x in (self.x_ND, self.x_ND[None]):
            try:
                with _evaluating(module):
                    output = functional_call(Unhooked(module), tensors, (x.clone(), *[self.bias_E] * more))
                logits, weights, experts = (tensor.flatten(0, -2) for tensor in output)
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):  # it wants or gives other things
                continue
            if weights.shape == experts.shape and len(weights) == PROBE_TOKENS and experts.dtype == torch.int64:
                return logits.float(), weights.float(), experts
        return None


class Unhooked(nn.Module):
    """A module without its hooks, which may steer it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Any:
        """Return what the module computes."""
        return self.module.forward(*args)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put one module into evaluation mode within the block."""
    training = module.training
    module.training = False
    try:
        yield
    finally:
        module.training = training


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6)


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
