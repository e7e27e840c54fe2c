"""Choice of experts within a pool that the tokens of a document share.

Reference: EMO (arXiv 2605.06663) and `EmoRouter` in OLMo-core. They mask the logits outside of the pool; here only the
choice is masked, which gives the same experts, and the same weights if they are divided by their sum. Our own: pools
from earlier tokens in evaluation, and pool sizes that depend on the seed, the step and the document.
Shapes: B sequences, S sequence length, N = B*S tokens, E experts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing, FinishedStep, Properties
from simbal.balancing.controls import splitmix64, uniform_numbers
from simbal.config.values import check_integer
from simbal.errors import UserError
from simbal.model.router import Candidates, Router


class DocumentPool(Balancing):
    """A token uses its K best experts among the m with the largest sums of softmax(logits) over its document.

    In training, m is uniform in [min_pool, max_pool] for each document, layer and step. Not causal within a document:
    its later tokens affect the pool of earlier ones, so the model can exploit future tokens. Evaluation is causal: m is
    `eval_pool`, and the sums are over the tokens so far. A document that is cut by a window counts as several.
    """

    citation = "arXiv 2605.06663; OLMo-core, EmoRouter; causal evaluation ours"
    properties = Properties(differentiable=False, scope="sequence", causal=False, revives_dead_experts=False)

    def __init__(
        self,
        end_of_text: int | None = None,
        seed: int = 0,
        min_pool: int | None = None,
        max_pool: int | None = None,
        eval_pool: int | None = None,
    ) -> None:
        """Set the sizes of the pools.

        Args:
            end_of_text: id of the last token of a document, required.
            seed: seed of the pool sizes.
            min_pool: smallest pool; None: K.
            max_pool: largest pool; None: all experts.
            eval_pool: pool in evaluation; None: (min_pool + max_pool) // 2.
        """
        super().__init__()
        self.end_of_text, self.seed = end_of_text, seed
        self.min_pool, self.max_pool, self.eval_pool = min_pool, max_pool, eval_pool
        self.step = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.formula = (
            "no loss; choice by logits within the m experts with the largest sum of softmax(logits) over the document; "
            f"m uniform in [{min_pool or 'K'}, {max_pool or 'E'}] per document in training"
        )

    def prepare(self, routers: Sequence[Router]) -> None:
        """Raise `UserError` without `end_of_text`, or if a pool has fewer than K experts or more than all."""
        if self.end_of_text is None:
            raise UserError("DocumentPool needs end_of_text, the id of the token that ends a document")
        for router in routers:
            num_experts = len(router.weight_ED)
            smallest, largest, evaluated = self._sizes(num_experts, router.top_k)
            check_integer("min_pool", smallest, router.top_k, num_experts)
            check_integer("max_pool", largest, smallest, num_experts)
            check_integer("eval_pool", evaluated, router.top_k, num_experts)

    def _sizes(self, num_experts: int, top_k: int) -> tuple[int, int, int]:
        """Return the smallest and the largest pool in training, and the pool in evaluation."""
        smallest = top_k if self.min_pool is None else self.min_pool
        largest = num_experts if self.max_pool is None else self.max_pool
        return smallest, largest, (smallest + largest) // 2 if self.eval_pool is None else self.eval_pool

    def choosable(self, num_experts: int, top_k: int) -> int:
        """Return the size of the pool in evaluation."""
        return self._sizes(num_experts, top_k)[2]

    def choice_scores(self, candidates: Candidates) -> Tensor:
        """Return the logits, (N, E), with -inf outside of the pool."""
        logits_NE, tokens_BS = candidates.logits_NE, candidates.tokens_BS
        smallest, largest, evaluated = self._sizes(logits_NE.shape[1], candidates.top_k)
        assert self.end_of_text is not None
        first_BS, last_BS = document_ends(tokens_BS, self.end_of_text)
        position_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        until_BS = last_BS if self.training else position_S.expand_as(last_BS)
        sums_BSE = sums_between(logits_NE.double().softmax(-1).view(*tokens_BS.shape, -1), first_BS, until_BS)
        if self.training:
            drawn_BS = self._uniform(tokens_BS, last_BS, candidates.layer)
            size_BS = smallest + (drawn_BS * (largest - smallest + 1)).long()
        else:
            size_BS = torch.full_like(tokens_BS, evaluated)
        rank_BSE = sums_BSE.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
        return logits_NE.masked_fill((rank_BSE >= size_BS[..., None]).flatten(0, 1), -torch.inf)

    def _uniform(self, tokens_BS: Tensor, last_BS: Tensor, layer: int) -> Tensor:
        """Return a hash of (seed, layer, step, sequence until the end of the document) in [0, 1), (B, S)."""
        until_BS = splitmix64(tokens_BS).cumsum(1).gather(1, last_BS)  # overflow wraps around
        keys_N = (until_BS + splitmix64(last_BS) + splitmix64(self.step + 1)).flatten()
        return uniform_numbers(keys_N, 1, self.seed, layer).view_as(tokens_BS)

    def update(self, step: FinishedStep) -> None:
        """Count the step, so that the next step gets pools of other sizes."""
        self.step.add_(1)


def document_ends(tokens_BS: Tensor, end_of_text: int) -> tuple[Tensor, Tensor]:
    """Return the positions of the first and the last token of each token's document, (B, S) each."""
    position_S, is_end_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device), tokens_BS == end_of_text
    is_end_BS[:, -1] = True
    is_first_BS = is_end_BS.roll(1, 1)  # the last token of the sequence ends a document
    first_BS = position_S.where(is_first_BS, 0).cummax(1).values
    last_BS = position_S.where(is_end_BS, len(position_S)).flip(1).cummin(1).values.flip(1)
    return first_BS, last_BS


def sums_between(values_BSE: Tensor, first_BS: Tensor, last_BS: Tensor) -> Tensor:
    """Return the sums over the positions from `first_BS` to `last_BS`, (B, S, E)."""
    total_BTE = torch.nn.functional.pad(values_BSE.cumsum(1), (0, 0, 1, 0))  # T = S + 1
    shape = (-1, -1, values_BSE.shape[2])
    return total_BTE.gather(1, last_BS[..., None].expand(shape) + 1) - total_BTE.gather(
        1, first_BS[..., None].expand(shape)
    )
