"""The experts of a host model's MoE layers: their inputs seen, each of them run on all tokens, or some left out.

Every block of experts of transformers is a module that takes the tokens, the chosen experts and their weights. So one
expert alone is that module with one choice for each token, whatever the experts compute.
Shapes: N tokens, R of them once for each kept choice, D model width, E experts, K experts per token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from simbal.analysis.shared.subject import Pruned
from simbal.host.routers import HostRouter
from simbal.metrics.similarity import RunningSimilarity
from simbal.model.expert_similarity import Watched

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]  # x_ND, experts_NK, weights_NK -> y_ND
Around = Callable[[Experts, Tensor, Tensor, Tensor], Tensor]  # the experts, and what they are called with


@contextmanager
def around(experts: nn.Module, wrapper: Around) -> Iterator[None]:
    """Compute the experts by `wrapper` within the block.

    It stands within what accelerate puts around a module whose weights are elsewhere, so that they are there for it.
    """
    name = "_old_forward" if hasattr(experts, "_old_forward") else "forward"
    own, inner = vars(experts).get(name), getattr(experts, name)

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The experts as they are called, with tokens in any number of dimensions."""
        choice, weights = _choice(args, kwargs)
        y_ND = wrapper(inner, x.flatten(0, -2), choice.flatten(0, -2), weights.flatten(0, -2))
        return y_ND.view(x.shape)

    setattr(experts, name, forward)
    try:
        yield
    finally:
        if own is None:
            delattr(experts, name)
        else:
            setattr(experts, name, own)


def outputs(inner: Experts, x_ND: Tensor, num_experts: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the outputs (N, D) of one expert after the other on all tokens, before the router's weights."""
    one_N1 = torch.ones(len(x_ND), 1, dtype=dtype, device=x_ND.device)
    for expert in range(num_experts):
        yield inner(x_ND, torch.full_like(one_N1, expert, dtype=torch.int64), one_N1)


@contextmanager
def seen_inputs(routers: Sequence[HostRouter]) -> Iterator[list[Tensor]]:
    """Yield a list that holds the last input (N, D) of each layer's experts after every forward pass."""
    inputs = [torch.empty(0)] * len(routers)

    def keep(index: int, inner: Experts, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        inputs[index] = x_ND
        return inner(x_ND, experts_NK, weights_NK)

    with _all_around(routers, keep):
        yield inputs


@contextmanager
def seen_similarity(routers: Sequence[HostRouter]) -> Iterator[Watched]:
    """Measure in every forward pass how alike the experts are; one expert's outputs are held at a time."""
    seen = Watched(len(routers))

    def measure(index: int, inner: Experts, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        running = RunningSimilarity()
        for y_ND in outputs(inner, x_ND, len(routers[index].weight_ED), weights_NK.dtype):
            running.add(y_ND)
        seen.add(index, running)
        return inner(x_ND, experts_NK, weights_NK)

    with _all_around(routers, measure):
        yield seen


@contextmanager
def pruned_experts(routers: Sequence[HostRouter], pruning: Pruned) -> Iterator[list[int]]:
    """Compute the kept choices alone, each as a token of its own; yield how many of them there were in each layer."""
    kept_L = [0] * len(routers)

    def prune(index: int, inner: Experts, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        kept_NK = pruning.kept(weights_NK)
        left_NK = pruning.weights(weights_NK, kept_NK)
        token_R, slot_R = kept_NK.nonzero(as_tuple=True)
        kept_L[index] += len(token_R)
        y_ND = torch.zeros_like(x_ND)
        if len(token_R):
            y_RD = inner(x_ND[token_R], experts_NK[token_R, slot_R, None], left_NK[token_R, slot_R, None])
            y_ND.index_add_(0, token_R, y_RD)
        return y_ND

    with _all_around(routers, prune):
        yield kept_L


@contextmanager
def _all_around(
    routers: Sequence[HostRouter], wrapper: Callable[[int, Experts, Tensor, Tensor, Tensor], Tensor]
) -> Iterator[None]:
    with ExitStack() as stack:
        for index, router in enumerate(routers):
            stack.enter_context(around(router.experts, partial(wrapper, index)))
        yield


def _choice(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the chosen experts and their weights, given by place or by name."""
    first, second = (*args, *kwargs.values())[:2]
    return (second, first) if first.is_floating_point() else (first, second)
