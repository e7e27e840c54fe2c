"""Controls: no balancing, a frozen router, hash routing and random routing.

Reference: Hash Layers (arXiv 2106.04426); integer hash: splitmix64 (Steele et al., OOPSLA 2014).
Shapes: B sequences, S sequence length, N = B*S tokens, E experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing, FinishedStep, Properties
from simbal.model.router import Candidates, Router

CHOICE_WITHOUT_ROUTER = Properties(
    differentiable=False, scope="token", causal=True, revives_dead_experts=True, equivariant=False
)


class NoBalancing(Balancing):
    """No balancing: loss = 0."""

    formula = "no loss"
    citation = "arXiv 2506.14038, figure 2"
    properties = Properties(differentiable=False, scope="weights", causal=True, revives_dead_experts=False)


class HashRouting(Balancing):
    """A token's experts are a fixed function of its id and the layer; the router only sets their weights."""

    formula = "no loss; experts by a hash of (seed, layer, token id)"
    citation = "arXiv 2106.04426"
    properties = CHOICE_WITHOUT_ROUTER

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return uniform random numbers, (N, E), that depend on the token id."""
        ids_N = candidates.tokens_BS.flatten()
        return uniform_numbers(ids_N, candidates.probs_NE.shape[1], self.seed, candidates.layer)


class UniformRouting(Balancing):
    """A token's experts are sampled uniformly at each step; the router only sets their weights.

    Samples are a hash of the seed, the step, the layer and the sequence so far. So they do not depend on the split
    into micro-batches and ranks, and a repeated forward pass gives the same samples.
    """

    formula = "no loss; experts sampled uniformly per step, layer and sequence so far"
    citation = "control"
    properties = CHOICE_WITHOUT_ROUTER

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.step = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return uniform random numbers, (N, E), different at each step."""
        prefix_BS = splitmix64(candidates.tokens_BS).cumsum(1)  # overflow wraps around, as intended for a hash
        position_S = torch.arange(prefix_BS.shape[1], device=prefix_BS.device)
        keys_N = (prefix_BS + splitmix64(position_S) + splitmix64(self.step + 1)).flatten()
        return uniform_numbers(keys_N, candidates.probs_NE.shape[1], self.seed, candidates.layer)

    def update(self, step: FinishedStep) -> None:
        """Count the step, so that the next step gets different samples."""
        self.step.add_(1)


class FrozenRouter(Balancing):
    """W stays at its random initialization: no gradient, no optimizer step and no weight decay."""

    formula = "no loss; W frozen at its random initialization"
    citation = "control"
    router_init = "orthogonal"
    sets_router_weight = True
    properties = Properties(differentiable=False, scope="weights", causal=True, revives_dead_experts=False)

    def prepare(self, routers: Sequence[Router]) -> None:
        """Freeze every router's weight."""
        for router in routers:
            router.weight_ED.requires_grad_(False)


def uniform_numbers(keys_N: Tensor, num_experts: int, seed: int, layer: int) -> Tensor:
    """Return a hash of (key, expert, seed, layer) in [0, 1), (N, E), fp64."""
    experts_E = torch.arange(num_experts, device=keys_N.device)
    stream_E = splitmix64(splitmix64(splitmix64(experts_E) + layer) + seed % 2**63)
    return (splitmix64(keys_N[:, None] + stream_E) >> 11 & (1 << 53) - 1).double() * 2.0**-53


def splitmix64(numbers: Tensor) -> Tensor:
    """Return the splitmix64 hash of int64 numbers, of the same shape."""
    z = numbers + -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number
    z = (z ^ _shift_right(z, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    z = (z ^ _shift_right(z, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return z ^ _shift_right(z, 31)


def _shift_right(numbers: Tensor, bits: int) -> Tensor:
    """Return a logical right shift; `>>` is arithmetic and repeats the sign."""
    return numbers >> bits & (1 << 64 - bits) - 1
