"""Controls: no balancing, a frozen router, hash routing and random routing.

Reference: Hash Layers (arXiv 2106.04426), with its balanced table; DeepSeek-V4's hash layers, as in transformers;
integer hash: splitmix64 (Steele et al., OOPSLA 2014).
Shapes: B sequences, S sequence length, N = B*S tokens, V vocabulary, L MoE layers, E experts, K experts per token.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from heapq import heapify, heappop, heappush
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing, FinishedStep, Properties
from simbal.config.values import check_choice
from simbal.errors import UserError
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
    """A token's experts are a fixed function of its id and the layer; the router only sets their weights.

    DeepSeek-V4's first layers also have a table of experts and learned weights; its table is not published.
    """

    citation = "arXiv 2106.04426"
    properties = CHOICE_WITHOUT_ROUTER

    def __init__(
        self,
        seed: int = 0,
        table: str = "random",
        file: str | None = None,
        weights: str = "learned",
        token_counts: Callable[[], Tensor] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Select the experts of each token id and their weights.

        Args:
            seed: seed of the random and the balanced table.
            table: random (a hash); round_robin (token id v gets v K, ..., v K + K - 1 modulo E); balanced (from the
                most frequent id to the rarest, each gets the K experts with the smallest load so far); or file.
            file: path of an .npy array of experts, (V, K) for all layers or (L, V, K), for table=file.
            weights: learned (by the router), or equal (the logits are multiplied by 0).
            token_counts: returns the number of training tokens of each id, (V,), for table=balanced.
            vocab_size: V, to check that the table in `file` has all token ids.

        Raises:
            UserError: an argument has an invalid value, or `file` is missing or not such an array.
        """
        super().__init__()
        self.seed, self.table = seed, check_choice("table", table, ("random", "round_robin", "balanced", "file"))
        self.token_counts, self.vocab_size = token_counts, vocab_size
        self._balanced = dict[int, Tensor]()  # (V, K) by layer
        if (table == "file") != (file is not None):
            raise UserError(f"file={file} must be set with table=file, and only then (got table={table})")
        rule = {
            "random": "by a hash of (seed, layer, token id)",
            "round_robin": "(K v, ..., K v + K - 1) modulo E for token id v",
            "balanced": "by a table of token ids with equal loads in the training text",
        }
        if file is not None:
            experts_LVK, digest = read_experts(Path(file))
            self.experts_LVK = nn.Buffer(experts_LVK)  # in checkpoints: the file may change
            rule["file"] = f"by the table with sha256 {digest}"
        if check_choice("weights", weights, ("learned", "equal")) == "equal":
            self.adjust_logits = equal_logits  # type: ignore[method-assign]
        self.formula = f"no loss; experts {rule[table]}{'; equal weights' if weights == 'equal' else ''}"

    def prepare(self, routers: Sequence[Router]) -> None:
        """Raise `UserError` if the table does not fit the routers."""
        for layer, router in enumerate(routers):
            if self.table == "file":
                self._check_file(layer, len(router.weight_ED), router.top_k)
            elif self.table == "balanced":
                self._balanced_table(layer, len(router.weight_ED), router.top_k)

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return scores, (N, E), that depend on the token id: random numbers, or 1 for the experts in the table."""
        ids_N, num_experts = candidates.tokens_BS.flatten(), candidates.probs_NE.shape[1]
        if self.table == "random":
            return uniform_numbers(ids_N, num_experts, self.seed, candidates.layer)
        if self.table == "round_robin":
            first_N1 = ids_N[:, None] * candidates.top_k
            experts_NK = (first_N1 + torch.arange(candidates.top_k, device=ids_N.device)) % num_experts
        elif self.table == "balanced":
            table_VK = self._balanced_table(candidates.layer, num_experts, candidates.top_k).to(ids_N.device)
            self._balanced[candidates.layer] = table_VK
            experts_NK = table_VK[ids_N]
        else:
            experts_NK = self._file_table(candidates.layer)[ids_N]
        return torch.zeros(len(ids_N), num_experts, device=ids_N.device).scatter(1, experts_NK, 1.0)

    def _balanced_table(self, layer: int, num_experts: int, top_k: int) -> Tensor:
        """Return the balanced experts of each token id in a layer, (V, K)."""
        if layer in self._balanced:
            return self._balanced[layer]
        if self.token_counts is None:
            raise UserError("table=balanced needs token_counts, a function that returns the tokens of each id")
        counts_V, first = self.token_counts().clamp(min=1), torch.zeros(1, dtype=torch.int64)
        random_V = uniform_numbers(torch.arange(len(counts_V)), 1, self.seed, layer)[:, 0]
        ids_V = random_V.argsort()
        ids_V = ids_V[counts_V[ids_V].argsort(descending=True, stable=True)]  # equal counts in random order
        experts_E = uniform_numbers(first, num_experts, self.seed, layer)[0].argsort()
        self._balanced[layer] = balanced_table(counts_V, ids_V, experts_E, top_k)
        return self._balanced[layer]

    def _file_table(self, layer: int) -> Tensor:
        """Return the experts of each token id in a layer, (V, K), from the file."""
        return self.experts_LVK[layer if len(self.experts_LVK) > 1 else 0]

    def _check_file(self, layer: int, num_experts: int, top_k: int) -> None:
        if layer >= len(self.experts_LVK) and len(self.experts_LVK) > 1:
            raise UserError(f"file has experts for {len(self.experts_LVK)} layers, fewer than the model")
        table_VK = self._file_table(layer)
        if self.vocab_size and len(table_VK) < self.vocab_size:
            raise UserError(f"file has experts for {len(table_VK)} token ids, fewer than {self.vocab_size}")
        sorted_VK = table_VK.sort(1).values
        different = bool((sorted_VK.diff(dim=1) > 0).all())
        if table_VK.shape[1] != top_k or not different or sorted_VK.min() < 0 or sorted_VK.max() >= num_experts:
            raise UserError(
                f"file must have {top_k} different experts from 0 to {num_experts - 1} for each token id, because "
                f"model.top_k={top_k} and model.num_experts={num_experts}"
            )


def balanced_table(counts_V: Tensor, ids_V: Tensor, experts_E: Tensor, top_k: int) -> Tensor:
    """Give each token id, in the order `ids_V`, the K experts with the smallest loads so far, (V, K).

    A load is the sum of `counts_V`. Ties go to the first expert in `experts_E`.
    """
    table_VK = np.empty((len(counts_V), top_k), dtype=np.int64)
    loads = [(0, place, expert) for place, expert in enumerate(experts_E.tolist())]
    heapify(loads)
    for token, count in zip(ids_V.tolist(), counts_V[ids_V].tolist(), strict=True):
        chosen = [heappop(loads) for _ in range(top_k)]
        table_VK[token] = [expert for _, _, expert in chosen]
        for load, place, expert in chosen:
            heappush(loads, (load + count, place, expert))
    return torch.from_numpy(table_VK)


def read_experts(file: Path) -> tuple[Tensor, str]:
    """Return the experts in an .npy file, (L, V, K), L = 1 if it has no layers, and the start of its sha256.

    Raises:
        UserError: the file cannot be read, or is not an array of whole numbers with two or three dimensions.
    """
    try:
        experts, digest = np.load(file, allow_pickle=False), sha256(file.read_bytes()).hexdigest()
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"file={file} cannot be read as an .npy array: {error}") from None
    if not isinstance(experts, np.ndarray) or experts.ndim not in (2, 3) or experts.dtype.kind not in "iu":
        raise UserError(f"file={file} must be an .npy array of whole numbers, (V, K) or (L, V, K)")
    return torch.from_numpy(experts.astype(np.int64)).view(-1, *experts.shape[-2:]), digest[:12]


def equal_logits(logits_NE: Tensor) -> Tensor:
    """Return logits of 0, (N, E), which give all experts the same weight."""
    return logits_NE * 0


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
