"""Finds the routers of a Hugging Face MoE, and the rule by which each turns logits into experts and weights.

In transformers 5 a block of experts has two parts: a router, which returns for N tokens the logits (N, E), the weights
of the chosen experts (N, K) and their indices (N, K); and `experts`, which take the tokens, these indices and these
weights. The rule of a router is found by running it on random numbers: names of classes and keys of configs have
changed their meaning between versions of transformers.

Reference: bias on the choice, arXiv 2408.15664.
Shapes: N tokens, D model width, E experts, K experts per token.
"""

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from simbal.errors import UserError
from simbal.model.router import Groups, apply_gating, topk_indices, topk_weights

NAMES = ("gate", "router")  # of routers in their blocks
BIASES = ("e_score_correction_bias", "expert_bias")  # on the choice; in a router or in its block
SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")  # attributes of routers
GROUPS = (("num_group", "topk_group"), ("n_group", "topk_group"))
KNOWN = "Mixtral, OLMoE, Qwen-MoE, DeepSeek-V2 and V3, GPT-OSS, Granite-MoE, Phi-3.5-MoE and those of their shape"
COPIES = "modules_to_save"  # the child of peft's wrapper that holds the trained copies of a module
PROBE_TOKENS = 64


@dataclass(frozen=True)
class Rule:
    """The rule of most routers: p = gating(logits); the K largest of p + bias; weights p, scaled.

    Where a model has groups, only the experts of the best of them can be chosen. A subclass for another kind of router
    overrides `candidates`, `scores` and `weights`, and is added to `RULES`.
    """

    gating: str  # softmax | sigmoid
    renormalize: bool  # the weights of the K are divided by their sum
    scale: float = 1.0  # of the weights, at last
    groups: Groups | None = None
    biased: bool = False  # a bias is added to p for the choice alone
    draws_in_training: ClassVar[bool] = False  # experts are drawn at random in training, which no steering can do

    @property
    def plain(self) -> bool:
        """Whether the experts of the K largest logits are chosen, so that a strategy may choose in their place."""
        return self.groups is None and not self.biased

    @classmethod
    def candidates(cls, module: nn.Module, biased: bool) -> Iterator[Self]:
        """Yield the rules that a router may follow, by its attributes; the first that it does follow is taken.

        Args:
            module: the router.
            biased: there is a bias for its choice.
        """
        given = (getattr(module, name, None) for name in SCALES)
        scales = [1.0, *(float(scale) for scale in given if isinstance(scale, int | float))]
        groups: list[Groups | None] = [None]
        for count, chosen in ((getattr(module, c, None), getattr(module, k, None)) for c, k in GROUPS):
            if isinstance(count, int) and isinstance(chosen, int) and count > 1:
                groups += [Groups(count, chosen, "best"), Groups(count, chosen, "best two")]
        kinds = product(("softmax", "sigmoid"), (True, False), dict.fromkeys(scales), groups, {biased, False})
        for gating, renormalize, scale, group, on_choice in kinds:
            yield cls(gating, renormalize, scale, group, on_choice)

    def scores(self, probs_NE: Tensor, bias_E: Tensor | None) -> Tensor:
        """Return the scores by whose K largest experts are chosen, (N, E)."""
        scores_NE = probs_NE if bias_E is None else probs_NE + bias_E
        return scores_NE if self.groups is None else self.groups.limited(scores_NE)

    def weights(self, logits_NE: Tensor, probs_NE: Tensor, experts_NK: Tensor) -> Tensor:
        """Return the weights of the chosen experts' outputs, (N, K)."""
        return self.scale * topk_weights(logits_NE, probs_NE, experts_NK, self.gating, self.renormalize)

    def decide(self, logits_NE: Tensor, top_k: int, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their weights, (N, K) each."""
        probs_NE = apply_gating(logits_NE, self.gating)
        experts_NK = topk_indices(self.scores(probs_NE, bias_E), top_k)
        return experts_NK, self.weights(logits_NE, probs_NE, experts_NK)


@dataclass(frozen=True)
class SparseMixer(Rule):
    """The rule of Phi-3.5-MoE in evaluation: the two largest logits, one after the other.

    The weight of each is its softmax over those logits that come close to the largest that is left:
    (largest - logit) / max(|logit|, largest) <= 2 jitter. In training the router draws experts, and weighs by another
    gradient than that of the softmax. Reference: arXiv 2310.00811; as in transformers.
    """

    jitter: float = 0.01
    draws_in_training: ClassVar[bool] = True

    @property
    def plain(self) -> bool:
        """False: the rule gives no weight to experts that another has chosen."""
        return False

    @classmethod
    def candidates(cls, module: nn.Module, biased: bool) -> Iterator[Self]:
        """Yield the rule for a router that has this jitter."""
        jitter = getattr(module, "router_jitter_noise", None)
        if isinstance(jitter, float) and not biased:
            yield cls("softmax", renormalize=False, jitter=jitter)

    def weights(self, logits_NE: Tensor, probs_NE: Tensor, experts_NK: Tensor) -> Tensor:
        """Return the weights of the chosen experts' outputs, (N, K)."""
        left_NE, weights = logits_NE, []
        for expert_N1 in torch.split(experts_NK, 1, dim=1):
            largest_N1 = left_NE.amax(1, keepdim=True)
            far_NE = (largest_N1 - logits_NE) / logits_NE.abs().clamp(min=largest_N1) > 2 * self.jitter
            weights.append(left_NE.masked_fill(far_NE, -math.inf).softmax(1).gather(1, expert_N1))
            left_NE = left_NE.scatter(1, expert_N1, -math.inf)
        return torch.cat(weights, 1)


RULES: list[type[Rule]] = [Rule, SparseMixer]


@dataclass(frozen=True)
class HFRouter:
    """A router of a Hugging Face model, with the attributes of simbal's `Router`."""

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
        """The router's weight, (E, D)."""
        owner, _, name = self.weight_name.rpartition(".")
        return _stored(self.module.get_submodule(owner), name)

    @property
    def bias(self) -> Tensor | None:
        """The bias on the choice, of E elements; looked up anew, as a model that moves makes new buffers."""
        return None if self.bias_at is None else _stored(*self.bias_at)

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


def _stored(owner: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer of a module, from where accelerate keeps it if that is not in the module."""
    tensor: Tensor = getattr(owner, name)
    if tensor.is_meta and hasattr(owner, "_hf_hook"):
        hook: Any = owner._hf_hook
        tensor = hook.weights_map[name]
    return tensor


def find_routers(model: nn.Module) -> list[HFRouter]:
    """Return every router of `model`, first layer first.

    Raises:
        UserError: there is none, one follows no rule that is known, or they differ in shape or rule.
    """
    idle = _idle_copies(model)
    blocks = [
        (f"{name}.{child}", _active_copy(getattr(block, child)), block)
        for name, block in model.named_modules()
        for child in NAMES
        if block not in idle
        and isinstance(getattr(block, "experts", None), nn.Module)
        and isinstance(getattr(block, child, None), nn.Module)
    ]
    if not blocks:
        raise UserError(f"{type(model).__name__} has no router that simbal knows: it knows those of {KNOWN}")
    routers = [_router(name, module, block, layer) for layer, (name, module, block) in enumerate(blocks)]
    if len({(len(router.weight_ED), router.top_k, router.rule) for router in routers}) > 1:
        raise UserError(f"the routers of {type(model).__name__} differ in number of experts, top_k or rule")
    return routers


def find_backbone(model: nn.Module, routers: list[HFRouter]) -> nn.Module:
    """Return the innermost module that takes `input_ids` and holds all routers; all wrappers lead to it."""
    wanted = {router.module for router in routers}
    takers = [
        module
        for module in model.modules()
        if "input_ids" in inspect.signature(module.forward).parameters and wanted <= set(module.modules())
    ]
    if not takers:
        raise UserError(f"{type(model).__name__} has no part that takes input_ids and holds all its routers")
    return takers[-1]  # modules() lists the outer one first


def _active_copy(module: nn.Module) -> nn.Module:
    """Return the module that runs in the place of `module`: the active copy of one that peft trains as a whole."""
    if COPIES not in module._modules:
        return module
    wrapper: Any = module  # peft's ModulesToSaveWrapper
    copies = wrapper.modules_to_save
    active: nn.Module = wrapper.original_module if wrapper.disable_adapters else copies[wrapper.active_adapters[0]]
    return active


def _idle_copies(model: nn.Module) -> set[nn.Module]:
    """Return peft's wrappers of modules that it trains as a whole, with the copies that do not run."""
    idle: set[nn.Module] = set()
    for wrapper in model.modules():
        if COPIES in wrapper._modules:
            idle |= {*wrapper.modules()} - {*_active_copy(wrapper).modules()}
    return idle


def _router(name: str, module: nn.Module, block: nn.Module, layer: int) -> HFRouter:
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
    bias_at = _find_bias(module, block)
    found = probe(module, matrices[0], getattr(*bias_at) if bias_at else None)
    if found is None:
        raise UserError(
            f"{name} is a {type(module).__name__}, which follows none of the rules in simbal.hf.routers.RULES: its own "
            "can be added there"
        )
    rule, top_k = found
    experts, bias_at = block.get_submodule("experts"), bias_at if rule.biased else None
    return HFRouter(name, module, experts, layer, top_k, rule, matrices[0], bias_at)


def _find_bias(module: nn.Module, block: nn.Module) -> tuple[nn.Module, str] | None:
    """Return where the bias on the choice of experts is, a buffer or parameter of the router or of its block."""
    for owner in (*module.modules(), *block.modules()):
        for name, _ in [*owner.named_buffers(recurse=False), *owner.named_parameters(recurse=False)]:
            if name in BIASES:
                return owner, name
    return None


@torch.no_grad()
def probe(module: nn.Module, weight_name: str, bias: Tensor | None) -> tuple[Rule, int] | None:
    """Return the rule that a router follows, and its K; None if it follows none of `RULES`.

    The router is run in evaluation mode, with random numbers in the place of its parameters and of the bias on its
    choice, as a bias that is 0 as yet would show nothing. Rules that decide alike but differ in gating count as none.
    """
    weight_ED = module.get_parameter(weight_name)
    draws, device = torch.Generator().manual_seed(0), "cpu" if weight_ED.is_meta else weight_ED.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws).to(device)

    num_experts, d_model = weight_ED.shape
    x_ND, bias_E = normal(PROBE_TOKENS, d_model), normal(num_experts) / 10
    tensors = {name: normal(*tensor.shape) / 10 for name, tensor in module.named_parameters() if tensor is not bias}
    tensors[weight_name] = normal(num_experts, d_model) / d_model**0.5
    on_logits = [tensor for tensor in tensors.values() if tensor.shape == (num_experts,)]
    expected_NE = torch.stack([x_ND @ tensors[weight_name].T, *(t.expand(len(x_ND), -1) for t in on_logits)]).sum(0)
    held = [*module.named_parameters(), *module.named_buffers()]
    tensors |= {name: bias_E.view_as(tensor) for name, tensor in held if tensor is bias}
    output = _run(module, tensors, x_ND, bias_E)
    if output is None or not _alike(output[0], expected_NE):
        return None
    _, weights_NK, experts_NK = output
    theirs_NE = torch.zeros_like(expected_NE).scatter(1, experts_NK, weights_NK)
    fits = []
    for rule in (rule for kind in RULES for rule in kind.candidates(module, bias is not None)):
        chosen_NK, given_NK = rule.decide(expected_NE, experts_NK.shape[1], bias_E if rule.biased else None)
        ours_NE = torch.zeros_like(theirs_NE).scatter(1, chosen_NK, given_NK)
        if torch.equal(chosen_NK.sort().values, experts_NK.sort().values) and _alike(ours_NE, theirs_NE):
            fits.append(rule)
    return (fits[0], experts_NK.shape[1]) if len({rule.gating for rule in fits}) == 1 else None


class _Unhooked(nn.Module):
    """A module without its hooks, which may steer it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Any:
        return self.module.forward(*args)


def _run(
    module: nn.Module, tensors: dict[str, Tensor], x_ND: Tensor, bias_E: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return a router's logits (N, E), weights and experts (N, K); None if it takes or returns something else."""
    others = len(inspect.signature(module.forward).parameters) - 1  # of these it takes the bias from its block
    given = {f"module.{name}": tensor for name, tensor in tensors.items()}
    training, module.training = module.training, False
    try:
        for x in (x_ND, x_ND[None]):
            try:
                output = functional_call(_Unhooked(module), given, (x.clone(), *[bias_E] * others))
                logits, weights, experts = (tensor.flatten(0, -2) for tensor in output)
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
                continue
            if weights.shape == experts.shape and len(weights) == PROBE_TOKENS and experts.dtype == torch.int64:
                return logits.float(), weights.float(), experts
        return None
    finally:
        module.training = training


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6)
