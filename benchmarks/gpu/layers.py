"""All implementations of an expert layer behind one interface, and their errors, for `gpu_check.py`.

Shapes: N tokens, D model width, F expert hidden width, E experts, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.upstream import upstream_module
from simbal.experts.backends import RoutingPlan
from simbal.experts.select import BACKENDS
from simbal.model.moe import FeedForward

NAMES = ("y", "dx", "dp", "dw13", "dw2")
ROUTINGS = ("balanced", "skewed", "collapsed")


@dataclass(frozen=True)
class Shape:
    """The sizes of one layer call."""

    name: str
    N: int
    D: int
    F: int
    E: int
    K: int

    @property
    def flops(self) -> int:
        """FLOPs of the forward pass; the backward pass has twice as many."""
        return 6 * self.N * self.K * self.D * self.F


@dataclass(frozen=True)
class Case:
    """Leaves (x, p, w13, w2), the chosen experts and an output gradient."""

    shape: Shape
    leaves: list[Tensor]
    experts_NK: Tensor
    dy_ND: Tensor


def make_case(shape: Shape, routing: str, device: torch.device, dtype: torch.dtype) -> Case:
    """Return random numbers (zeros would be faster). skewed: hot and empty experts; collapsed: K experts."""
    g = torch.Generator().manual_seed(0)
    logits_NE = torch.randn(shape.N, shape.E, generator=g)
    if routing == "skewed":
        logits_NE += 1.5 * torch.randn(shape.E, generator=g)
        logits_NE[:, :: max(2, shape.E // 4)] -= 30
    elif routing == "collapsed":
        logits_NE[:, : shape.K] += 30
    p_NK, experts_NK = logits_NE.softmax(-1).topk(shape.K)
    sizes = (
        (shape.N, shape.D), (shape.E, 2, shape.F, shape.D), (shape.E, shape.F, shape.D), (shape.N, shape.D),
    )  # fmt: skip
    x, w13, w2, dy = (torch.randn(size, generator=g) for size in sizes)
    scaled = (x, w13 * shape.D**-0.5, w2 * shape.F**-0.5, dy)
    x, w13, w2, dy = (tensor.to(device, dtype) for tensor in scaled)
    return Case(shape, [x, p_NK.to(device), w13, w2], experts_NK.to(device), dy)


class Ours:
    """A backend of simbal, including the routing plan."""

    def __init__(self, name: str) -> None:
        self.run = BACKENDS[name].run

    def prepare(self, case: Case) -> list[Tensor]:
        """Create the leaf tensors."""
        return [leaf.detach().clone().requires_grad_() for leaf in case.leaves]

    def forward(self, leaves: Sequence[Tensor], case: Case) -> Tensor:
        """y."""
        x, p, w13, w2 = leaves
        return self.run(x, RoutingPlan.build(case.experts_NK, p, len(w2)), w13, w2)

    def gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """dx, dp, dw13, dw2."""
        return list(gradients)


class Upstream(Ours):
    """MegaBlocks' own module. Its three weights are leaves, so the timing includes no layout conversion."""

    def __init__(self, impl: str) -> None:
        self.impl, self.num_experts = impl, 0
        self.module: Any = None

    def prepare(self, case: Case) -> list[Tensor]:
        """x, p, w1, v1, w2."""
        x, p, w13, w2 = case.leaves
        shape = case.shape
        self.num_experts = shape.E
        self.module = upstream_module(self.impl, shape.D, shape.F, shape.E, shape.K, x.device, x.dtype)
        gate, up, down = (w.flatten(0, 1) for w in (w13[:, 0], w13[:, 1], w2))
        self.module.load_state_dict({"mlp.w1": gate, "mlp.v1": up, "mlp.w2": down})
        mlp = self.module.mlp
        return [x.detach().clone().requires_grad_(), p.detach().clone().requires_grad_(), mlp.w1, mlp.v1, mlp.w2]

    def forward(self, leaves: Sequence[Tensor], case: Case) -> Tensor:
        """y."""
        x, p = leaves[:2]
        y: Tensor = self.module(x[None], None, p.to(x.dtype), case.experts_NK)[0]
        return y

    def gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients in our layout."""
        dx, dp, *weights = gradients
        dgate, dup, dw2 = (weight.view(self.num_experts, -1, weight.shape[1]) for weight in weights)
        return [dx, dp, torch.stack([dgate, dup], 1), dw2]


class Dense(Ours):
    """One SwiGLU as wide as K experts: the same active parameters without routing, an upper bound for the speed."""

    def __init__(self) -> None:
        self.layer: Any = None

    def prepare(self, case: Case) -> list[Tensor]:
        """Create x and the two weights."""
        x, shape = case.leaves[0], case.shape
        self.layer = FeedForward(shape.D, shape.K * shape.F).to(x.device, x.dtype)
        for weight in self.layer.parameters():
            torch.nn.init.normal_(weight, std=shape.D**-0.5)
        return [x.detach().clone().requires_grad_(), self.layer.w13_2FD, self.layer.w2_FD]

    def forward(self, leaves: Sequence[Tensor], case: Case) -> Tensor:
        """y."""
        y: Tensor = self.layer(leaves[0])
        return y


def step(implementation: Ours, case: Case) -> list[Tensor]:
    """Return y, dx, dp, dw13, dw2."""
    leaves = implementation.prepare(case)
    y = implementation.forward(leaves, case)
    return [y.detach(), *implementation.gradients(torch.autograd.grad(y, leaves, case.dy_ND))]


def wanted(case: Case) -> list[Tensor]:
    """Return the results of `reference` in fp32, without TF32."""
    assert not torch.backends.cuda.matmul.allow_tf32
    exact = Case(case.shape, [leaf.float() for leaf in case.leaves], case.experts_NK, case.dy_ND.float())
    return step(Ours("reference"), exact)


def errors(got: list[Tensor], want: list[Tensor]) -> dict[str, float]:
    """Return the largest error of each tensor relative to its largest entry; NaN stays NaN."""
    return {
        name: ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()
        for name, a, b in zip(NAMES, got, want, strict=True)
    }
