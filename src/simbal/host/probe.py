"""Finds the rule that a router follows, by running it on random numbers.

Shapes: N tokens, D model width, E experts, K experts per token.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from simbal.host.rules import RULES, Rule

PROBE_TOKENS = 64


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
