"""Discovery of the routers in a Hugging Face MoE, and of their rules for choosing and weighting experts.

In transformers 5 an MoE block has two parts: a router, which maps N tokens to logits (N, E), weights (N, K) and experts
(N, K), and `experts`, which take the tokens, the chosen experts and their weights. A router's rule is found by
running the router on random inputs, because the meaning of class names and config keys changes between versions.

Reference: bias on the choice of experts, arXiv 2408.15664.
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
from torch.func import functional_call

from simbal.distributed import full_tensor
from simbal.errors import UserError
from simbal.model.router import Candidates, Groups, apply_gating, topk_indices, topk_weights

ROUTER_NAMES = ("gate", "router")  # in an MoE block
BIAS_NAMES = ("e_score_correction_bias", "expert_bias")  # in a router or in its block
SCALE_NAMES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")  # in a router
GATINGS = ("softmax", "sigmoid", "sqrtsoftplus")
PEFT_COPIES = "modules_to_save"  # attribute of peft's wrapper with the trained copies of a module
PROBE_TOKENS = 64


@dataclass(frozen=True)
class Rule:
    """The usual rule: p = gating(logits), the K largest p + bias are chosen, and the weights are scale * p.

    With groups, only experts of the best groups can be chosen. To support another kind of router, subclass `Rule`,
    override `candidates`, `scores` and `weights`, and append the class to `RULES`.
    """

    gating: str  # softmax | sigmoid | sqrtsoftplus
    renormalize: bool  # divide the K weights by their sum
    scale: float = 1.0
    groups: Groups | None = None
    biased: bool = False  # a bias is added to p for the choice only
    samples_in_training: ClassVar[bool] = False  # experts are sampled in training and cannot be steered

    @property
    def is_topk(self) -> bool:
        """Whether the K largest logits are chosen, and weights are defined for any other choice."""
        return self.groups is None and not self.biased and not self.samples_in_training

    @classmethod
    def candidates(cls, module: nn.Module, biased: bool) -> Iterator[Self]:
        """Yield the rules that a router may follow, judging by its attributes. The first rule that fits is used.

        Args:
            module: the router.
            biased: whether the router or its block has a bias for the choice.
        """
        attributes = (getattr(module, name, None) for name in SCALE_NAMES)
        scales = [1.0, *(float(scale) for scale in attributes if isinstance(scale, int | float))]
        groups: list[Groups | None] = [None]
        count = getattr(module, "n_group", getattr(module, "num_group", None))
        chosen = getattr(module, "topk_group", None)
        if isinstance(count, int) and isinstance(chosen, int) and count > 1:
            groups += [Groups(count, chosen, "best"), Groups(count, chosen, "best two")]
        for options in product(GATINGS, (True, False), dict.fromkeys(scales), groups, {biased, False}):
            yield cls(*options)

    def scores(self, probs_NE: Tensor, bias_E: Tensor | None) -> Tensor:
        """Return the scores, (N, E); each token goes to its K largest."""
        scores_NE = probs_NE if bias_E is None else probs_NE + bias_E
        return scores_NE if self.groups is None else self.groups.limited(scores_NE)

    def weights(self, logits_NE: Tensor, probs_NE: Tensor, experts_NK: Tensor) -> Tensor:
        """Return the weights of the chosen experts, (N, K)."""
        return self.scale * topk_weights(logits_NE, probs_NE, experts_NK, self.gating, self.renormalize)

    def decide(self, logits_NE: Tensor, top_k: int, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their weights, (N, K) each."""
        probs_NE = apply_gating(logits_NE, self.gating)
        experts_NK = topk_indices(self.scores(probs_NE, bias_E), top_k)
        return experts_NK, self.weights(logits_NE, probs_NE, experts_NK)


@dataclass(frozen=True)
class SparseMixer(Rule):
    """The rule of Phi-3.5-MoE in evaluation mode: the two largest logits, chosen one after the other.

    The weight of each expert is its softmax over the logits close to the largest remaining logit:
    (largest - logit) / max(|logit|, largest) <= 2 jitter. In training the router samples experts and has another
    gradient. Reference: arXiv 2310.00811, as implemented in transformers.
    """

    jitter: float = 0.01
    samples_in_training: ClassVar[bool] = True

    @classmethod
    def candidates(cls, module: nn.Module, biased: bool) -> Iterator[Self]:
        """Yield the rule with the router's jitter."""
        jitter = getattr(module, "router_jitter_noise", None)
        if isinstance(jitter, float) and not biased:
            yield cls("softmax", renormalize=False, jitter=jitter)

    def weights(self, logits_NE: Tensor, probs_NE: Tensor, experts_NK: Tensor) -> Tensor:
        """Return the weights of the chosen experts, (N, K)."""
        remaining_NE, weights = logits_NE, []
        for expert_N1 in torch.split(experts_NK, 1, dim=1):
            largest_N1 = remaining_NE.amax(1, keepdim=True)
            distant_NE = (largest_N1 - logits_NE) / logits_NE.abs().clamp(min=largest_N1) > 2 * self.jitter
            weights.append(remaining_NE.masked_fill(distant_NE, -math.inf).softmax(1).gather(1, expert_N1))
            remaining_NE = remaining_NE.scatter(1, expert_N1, -math.inf)
        return torch.cat(weights, 1)


RULES: list[type[Rule]] = [Rule, SparseMixer]


@dataclass(frozen=True)
class HFRouter:
    """A router of a Hugging Face model, with the attributes of simbal's `Router` that strategies read."""

    name: str
    module: nn.Module
    experts: nn.Module
    layer: int
    top_k: int
    rule: Rule
    weight_name: str
    bias_at: tuple[nn.Module, str] | None  # owner and name of the model's own bias on the choice

    @property
    def parameter_ED(self) -> Tensor:
        """The parameter that holds the router's weight, (E, D); with FSDP2 a shard outside of the layer's pass."""
        owner, _, name = self.weight_name.rpartition(".")
        return _loaded(self.module.get_submodule(owner), name)

    @property
    def weight_ED(self) -> Tensor:
        """The router's weight, (E, D), gathered if it is sharded: every rank must read it."""
        return full_tensor(self.parameter_ED)

    @property
    def bias(self) -> Tensor | None:
        """The model's own bias on the choice, with E elements. Not cached: moving a model replaces its buffers."""
        return None if self.bias_at is None else _loaded(*self.bias_at)

    @property
    def bias_E(self) -> Tensor | None:
        """The bias as (E,)."""
        return None if self.bias is None else self.bias.view(-1)

    @property
    def gating(self) -> str:
        """softmax, sigmoid or sqrtsoftplus."""
        return self.rule.gating

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the scores, (N, E), by which the router itself chooses: the logits if its rule is top-k."""
        if self.rule.is_topk:
            return candidates.logits_NE
        return self.rule.scores(candidates.probs_NE, self.bias_E)


def _loaded(owner: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer, from accelerate's store if it is offloaded."""
    tensor: Tensor = getattr(owner, name)
    if tensor.is_meta and hasattr(owner, "_hf_hook"):
        hook: Any = owner._hf_hook
        tensor = hook.weights_map[name]
    return tensor


def find_routers(model: nn.Module) -> list[HFRouter]:
    """Return all routers of `model`, first layer first, except routers that choose experts by token id (DeepSeek-V4).

    Raises:
        UserError: the model has no router, a router follows no known rule, or routers differ in shape or rule.
    """
    inactive = _inactive_copies(model)
    blocks = [
        (f"{name}.{child}", _active_copy(getattr(block, child)), block)
        for name, block in model.named_modules()
        for child in ROUTER_NAMES
        if block not in inactive
        and isinstance(getattr(block, "experts", None), nn.Module)
        and isinstance(getattr(block, child, None), nn.Module)
        and "input_ids" not in inspect.signature(getattr(block, child).forward).parameters
    ]
    if not blocks:
        raise UserError(f"{type(model).__name__} has no known router; docs/guide/huggingface.md lists known models")
    routers = [_router(name, module, block, layer) for layer, (name, module, block) in enumerate(blocks)]
    if len({(len(router.parameter_ED), router.top_k, router.rule) for router in routers}) > 1:
        raise UserError(f"the routers of {type(model).__name__} differ in number of experts, top_k or rule")
    return routers


def find_backbone(model: nn.Module, routers: list[HFRouter]) -> nn.Module:
    """Return the innermost module that takes `input_ids` and contains all routers. Every wrapper calls this module."""
    modules = {router.module for router in routers}
    backbones = [
        module
        for module in model.modules()
        if "input_ids" in inspect.signature(module.forward).parameters and modules <= set(module.modules())
    ]
    if not backbones:
        raise UserError(f"{type(model).__name__} has no module that takes input_ids and contains all routers")
    return backbones[-1]  # modules() lists outer modules first


def _active_copy(module: nn.Module) -> nn.Module:
    """Return the module that runs in place of `module`: the active copy if peft trains the full module."""
    if PEFT_COPIES not in module._modules:
        return module
    wrapper: Any = module  # peft's ModulesToSaveWrapper
    copies = wrapper.modules_to_save
    active: nn.Module = wrapper.original_module if wrapper.disable_adapters else copies[wrapper.active_adapters[0]]
    return active


def _inactive_copies(model: nn.Module) -> set[nn.Module]:
    """Return peft's wrappers of fully trained modules, and the copies in them that do not run."""
    inactive: set[nn.Module] = set()
    for wrapper in model.modules():
        if PEFT_COPIES in wrapper._modules:
            inactive |= {*wrapper.modules()} - {*_active_copy(wrapper).modules()}
    return inactive


def _router(name: str, module: nn.Module, block: nn.Module, layer: int) -> HFRouter:
    if "lora_A" in module._modules:
        module_name = name.rpartition(".")[2]
        raise UserError(f"{name} is trained by LoRA: use LoraConfig(modules_to_save=['{module_name}']) for routers")
    matrices = [key for key, p in module.named_parameters() if p.ndim == 2 and min(p.shape) > 1]
    bias_at = _find_bias(module, block)
    probed = probe(module, matrices[0], getattr(*bias_at) if bias_at else None) if len(matrices) == 1 else None
    if probed is None:
        raise UserError(f"{name}, a {type(module).__name__}, follows none of the rules in simbal.hf.routers.RULES")
    rule, top_k = probed
    experts, bias_at = block.get_submodule("experts"), bias_at if rule.biased else None
    return HFRouter(name, module, experts, layer, top_k, rule, matrices[0], bias_at)


def _find_bias(module: nn.Module, block: nn.Module) -> tuple[nn.Module, str] | None:
    """Return the owner and name of the bias on the choice of experts, in the router or in its block."""
    for owner in (*module.modules(), *block.modules()):
        for name, _ in [*owner.named_buffers(recurse=False), *owner.named_parameters(recurse=False)]:
            if name in BIAS_NAMES:
                return owner, name
    return None


@torch.no_grad()
def probe(module: nn.Module, weight_name: str, bias: Tensor | None) -> tuple[Rule, int] | None:
    """Return the rule that a router follows and its K, or None if it follows none of `RULES`.

    The router runs in evaluation mode with random parameters and a random bias, because a bias of 0 has no effect.
    If rules with different gatings fit, the result is None.
    """
    weight_ED = module.get_parameter(weight_name)
    generator, device = torch.Generator().manual_seed(0), "cpu" if weight_ED.is_meta else weight_ED.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    num_experts, d_model = weight_ED.shape
    if bias is not None and bias.numel() != num_experts:  # Inkling's router also weights the shared experts
        return None
    x_ND, bias_E = normal(PROBE_TOKENS, d_model), normal(num_experts) / 10
    tensors = {name: normal(*tensor.shape) / 10 for name, tensor in module.named_parameters() if tensor is not bias}
    tensors[weight_name] = normal(num_experts, d_model) / d_model**0.5
    logits_NE = x_ND @ tensors[weight_name].T
    logits_NE = logits_NE + sum(tensor for tensor in tensors.values() if tensor.shape == (num_experts,))
    named = [*module.named_parameters(), *module.named_buffers()]
    tensors |= {name: bias_E.view(tensor.shape) for name, tensor in named if tensor is bias}
    output = _run(module, tensors, x_ND, bias_E)
    if output is None or not is_close(output[0], logits_NE):
        return None
    _, weights_NK, experts_NK = output
    theirs_NE = torch.zeros_like(logits_NE).scatter(1, experts_NK, weights_NK)
    fits = []
    for rule in (rule for kind in RULES for rule in kind.candidates(module, bias is not None)):
        chosen_NK, ours_NK = rule.decide(logits_NE, experts_NK.shape[1], bias_E if rule.biased else None)
        ours_NE = torch.zeros_like(theirs_NE).scatter(1, chosen_NK, ours_NK)
        if torch.equal(chosen_NK.sort().values, experts_NK.sort().values) and is_close(ours_NE, theirs_NE):
            fits.append(rule)
    return (fits[0], experts_NK.shape[1]) if len({rule.gating for rule in fits}) == 1 else None


class _Unhooked(nn.Module):
    """Runs a module without the hooks of `attach` and accelerate."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Any:
        return getattr(self.module, "_old_forward", self.module.forward)(*args)


def _run(
    module: nn.Module, tensors: dict[str, Tensor], x_ND: Tensor, bias_E: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return a router's logits (N, E), weights and experts (N, K), or None if it has another signature."""
    num_biases = len(inspect.signature(module.forward).parameters) - 1  # some routers take the bias of the block
    renamed = {f"module.{name}": tensor for name, tensor in tensors.items()}
    training, module.training = module.training, False
    try:
        for x in (x_ND.clone(), x_ND[None].clone()):  # AFMoE's router takes (B, S, D)
            try:
                output = functional_call(_Unhooked(module), renamed, (x, *[bias_E] * num_biases))
                logits, weights, experts = (tensor.flatten(0, -2) for tensor in output)
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
                continue
            if weights.shape == experts.shape and len(weights) == len(x_ND) and experts.dtype == torch.int64:
                return logits.float(), weights.float(), experts
        return None
    finally:
        module.training = training


def is_close(a: Tensor, b: Tensor, rtol: float = 1e-4, atol: float = 1e-6) -> bool:
    """Whether two tensors have the same shape, and the same values up to rounding."""
    return a.shape == b.shape and torch.allclose(a, b, rtol, atol)
