"""Controls: no balancing, a router that learns nothing, and experts that no router chose.

Reference: Hash Layers (arXiv 2106.04426); mixing of integers: splitmix64 (Steele et al., OOPSLA 2014).
Shapes: B sequences, S sequence length, N = B*S tokens, E experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing, FinishedStep, Properties
from simbal.model.router import Candidates, Router

CHOSEN_BLINDLY = Properties(
    differentiable=False, scope="token", causal=True, revives_dead_experts=True, equivariant=False
)


class NoBalancing(Balancing):
    """No balancing: loss = 0."""

    formula = "no loss"
    citation = "arXiv 2506.14038, figure 2"
    properties = Properties(differentiable=False, scope="weights", causal=True, revives_dead_experts=False)


class HashRouting(Balancing):
    """The experts of a token are a fixed function of its id and the layer; the router only weighs them."""

    formula = "no loss; experts by a hash of (seed, layer, token id)"
    citation = "arXiv 2106.04426"
    properties = CHOSEN_BLINDLY

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return uniform numbers, (N, E), the same whenever a token id returns."""
        ids_N = candidates.tokens_BS.flatten()
        return uniform_numbers(ids_N, candidates.probs_NE.shape[1], self.seed, candidates.layer)


class UniformRouting(Balancing):
    """Every token's experts are drawn anew at each step, all with equal probability; the router only weighs them.

    The draw is a hash of the seed, the step, the layer and the sequence so far: whatever the cut into micro-batches and
    ranks, and in a forward pass that is repeated, it is the same.
    """

    formula = "no loss; experts drawn uniformly for each step, layer, sequence so far"
    citation = "control"
    properties = CHOSEN_BLINDLY

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.step = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return uniform numbers, (N, E), new at each step."""
        prefix_BS = mixed(candidates.tokens_BS).cumsum(1)  # wraps around, as hashes do
        position_S = torch.arange(prefix_BS.shape[1], device=prefix_BS.device)
        keys_N = (prefix_BS + mixed(position_S) + mixed(self.step + 1)).flatten()
        return uniform_numbers(keys_N, candidates.probs_NE.shape[1], self.seed, candidates.layer)

    def update(self, step: FinishedStep) -> None:
        """Count the step, so that the next one draws other numbers."""
        self.step.add_(1)


class FrozenRouter(Balancing):
    """W stays as it was drawn: no gradient, no step of the optimizer and no weight decay; all else learns around it."""

    formula = "no loss; W as drawn, never trained"
    citation = "control"
    router_init = "orthogonal"
    sets_router_weight = True
    properties = Properties(differentiable=False, scope="weights", causal=True, revives_dead_experts=False)

    def prepare(self, routers: Sequence[Router]) -> None:
        """Take every router's weight out of training."""
        for router in routers:
            router.weight_ED.requires_grad_(False)


def uniform_numbers(keys_N: Tensor, num_experts: int, seed: int, layer: int) -> Tensor:
    """Return a hash of (key, expert, seed, layer) in [0, 1), (N, E), fp64."""
    experts_E = torch.arange(num_experts, device=keys_N.device)
    stream_E = mixed(mixed(mixed(experts_E) + layer) + seed % 2**63)
    return (mixed(keys_N[:, None] + stream_E) >> 11 & (1 << 53) - 1).double() * 2.0**-53


def mixed(numbers: Tensor) -> Tensor:
    """Return splitmix64 of int64 numbers, of the same shape: every bit of the input is in every bit of the output."""
    z = numbers + -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number
    z = (z ^ _shifted(z, 30)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
    z = (z ^ _shifted(z, 27)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return z ^ _shifted(z, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Return the numbers shifted to the right, filled with zeros; `>>` alone would repeat the sign."""
    return numbers >> bits & (1 << 64 - bits) - 1
