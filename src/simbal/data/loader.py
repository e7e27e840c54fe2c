"""Batches of tokens: batch s is a function of (seed, s) alone, whatever the ranks and the accumulation.

A window is one sequence and its last target: window i of a split holds its tokens [i*S, i*S + S + 1). Sequences cross
documents.

Shapes: B sequences of a micro-batch, G of an optimizer step, W windows of a split, S sequence length, T = S + 1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from lightning import LightningDataModule
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from simbal.data.store import Store
from simbal.errors import UserError


def windows_of(tokens: NDArray[Any], seq_len: int) -> NDArray[Any]:
    """Return all windows, (W, T): a view, nothing is read."""
    if len(tokens) <= seq_len:
        return np.empty((0, seq_len + 1), tokens.dtype)
    return sliding_window_view(tokens, seq_len + 1)[::seq_len]


def batch_windows(seed: int, step: int, num_windows: int, global_batch: int) -> NDArray[np.int64]:
    """Return the indices of the windows that optimizer step `step` sees, (G,).

    An epoch is as many whole batches as fit, each epoch in a new order.
    """
    epoch, position = divmod(step, num_windows // global_batch)
    return _epoch_order(seed, epoch, num_windows)[position * global_batch : (position + 1) * global_batch]


@lru_cache(maxsize=1)
def _epoch_order(seed: int, epoch: int, num_windows: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_windows)


@dataclass(eq=False)
class TrainBatches:
    """The micro-batches of a whole run, each (B, T) int64; iteration goes on from where the run stands.

    Lightning saves its state and restores it. It needs `__len__` for that: without, it fetches one batch ahead of the
    one it trains on, and a resumed run would skip it.
    """

    windows_WT: NDArray[Any]
    tokens_fingerprint: str
    seed: int
    global_batch: int
    micro_batch: int
    max_steps: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.global_batch % (self.micro_batch * self.world_size):
            raise UserError(
                f"trainer.global_batch={self.global_batch} must be a multiple of "
                f"trainer.micro_batch={self.micro_batch} times {self.world_size} devices"
            )
        self.accumulation = self.global_batch // (self.micro_batch * self.world_size)
        self._yielded = 0

    def __len__(self) -> int:
        return self.max_steps * self.accumulation

    def __iter__(self) -> Iterator[Tensor]:
        while self._yielded < len(self):
            step, part = divmod(self._yielded, self.accumulation)
            self._yielded += 1  # before the yield: Lightning saves while the generator is suspended there
            yield self._batch(step, part)

    def micro_batches(self, step: int) -> list[Tensor]:
        """Return all micro-batches that this rank sees in an optimizer step."""
        return [self._batch(step, part) for part in range(self.accumulation)]

    def _batch(self, step: int, part: int) -> Tensor:
        windows_G = batch_windows(self.seed, step, len(self.windows_WT), self.global_batch)
        start = (part * self.world_size + self.rank) * self.micro_batch
        return _gather(self.windows_WT, windows_G[start : start + self.micro_batch])

    @property
    def _identity(self) -> dict[str, int | str]:
        """The values that decide the batches of all steps; neither rank nor accumulation does."""
        return {
            "seed": self.seed,
            "global_batch": self.global_batch,
            "num_windows": len(self.windows_WT),
            "tokens_fingerprint": self.tokens_fingerprint,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps.

        `step` and `part` are the optimizer steps done and the micro-batches of the next; the rest decides their
        content.
        """
        step, part = divmod(self._yielded, self.accumulation)
        return {"step": step, "part": part, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the saved step.

        Raises:
            UserError: if the state belongs to other batches or was taken inside a step.
        """
        for key, value in self._identity.items():
            if state[key] != value:
                raise UserError(f"the checkpoint was trained with {key}={state[key]}, not {value}: start a new run")
        if state["part"]:
            raise UserError(f"the checkpoint was taken inside step {state['step']}, not after it: start a new run")
        self._yielded = state["step"] * self.accumulation


class HeldOut(NamedTuple):
    """A batch of the validation split: windows, (B, T), and the document of each of their targets, (B, S); int64.

    One without documents is for ranks that have a batch fewer than others, and counts for nothing.
    """

    windows_BT: Tensor
    documents_BS: Tensor


@dataclass(frozen=True)
class ValidationSplit:
    """The windows of the validation split, and which of them stand for all.

    Windows that lie beyond the first `document_tokens` of their document are left out, as a few long documents would
    decide a mean over tokens. A part is drawn at random over all others, by the seed of the data alone: it is the same
    for every arm, and a smaller part is in a larger one.
    """

    windows_WT: NDArray[Any]
    document_ends: NDArray[np.uint64]  # the position after each document, (documents,)
    seed: int
    document_tokens: int | None = None

    @classmethod
    def of(cls, store: Store, seq_len: int, seed: int, document_tokens: int | None) -> Self:
        """Return the split of a store in windows of `seq_len` tokens and the last target."""
        windows_WT = windows_of(store.tokens("validation"), seq_len)
        return cls(windows_WT, store.document_ends("validation"), seed, document_tokens)

    @cached_property
    def whole(self) -> NDArray[np.int64]:
        """The indices, in file order, of all windows that are not left out."""
        windows_W = np.arange(len(self.windows_WT))
        if self.document_tokens is None:
            return windows_W
        seq_len, starts = self.windows_WT.shape[1] - 1, np.concatenate([[0], self.document_ends]).astype(np.int64)
        first_W = windows_W * seq_len + 1  # target
        document_W = np.searchsorted(self.document_ends, first_W, side="right")
        within_W = first_W - starts[document_W] < self.document_tokens
        begins_one_W = document_W != np.searchsorted(self.document_ends, first_W + seq_len - 1, side="right")
        whole_W: NDArray[np.int64] = windows_W[within_W | begins_one_W]
        return whole_W

    def drawn(self, tokens: int | None) -> NDArray[np.int64]:
        """Return the indices, in file order, of as many windows as fit `tokens`, at least one; all for None."""
        if tokens is None:
            return self.whole
        wanted = max(1, tokens // (self.windows_WT.shape[1] - 1))
        order = np.random.Generator(np.random.PCG64([self.seed, 0, 1])).permutation(len(self.whole))
        return self.whole[np.sort(order[:wanted])]  # an epoch of the training split has two numbers

    def documents(self, windows_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the document of each target of these windows, (B, S)."""
        seq_len = self.windows_WT.shape[1] - 1
        targets_BS = windows_B[:, None] * seq_len + np.arange(1, seq_len + 1)
        documents_BS: NDArray[np.int64] = np.searchsorted(self.document_ends, targets_BS, side="right")
        return documents_BS

    def batches(self, tokens: int | None, micro_batch: int, rank: int = 0, world_size: int = 1) -> "ValidationBatches":
        """Return the windows for `tokens` as batches; of several ranks each has a part."""
        return ValidationBatches(self, self.drawn(tokens), micro_batch, rank, world_size)


class ValidationBatches:
    """Windows of the validation split in file order as `HeldOut`, the last batch smaller.

    Rank r of R has every R-th window from r on. All have as many batches: in a forward pass of a model in shards each
    rank waits for the others.
    """

    def __init__(
        self, split: ValidationSplit, windows_W: NDArray[np.int64], micro_batch: int, rank: int, world_size: int
    ) -> None:
        self._split, self._micro_batch = split, micro_batch
        self._windows_W, self._most = windows_W[rank::world_size], len(windows_W[::world_size])

    def __len__(self) -> int:
        return math.ceil(self._most / self._micro_batch)

    def __iter__(self) -> Iterator[HeldOut]:
        for start in range(0, self._most, self._micro_batch):
            windows_B = self._windows_W[start : start + self._micro_batch]
            documents_BS = torch.from_numpy(self._split.documents(windows_B))
            again_B = windows_B if len(windows_B) else self._windows_W[:1]
            yield HeldOut(_gather(self._split.windows_WT, again_B), documents_BS)


def _gather(windows_WT: NDArray[Any], which: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(windows_WT[which].astype(np.int64))


class TokenData(LightningDataModule):
    """A store's two splits as batches; it needs `Trainer(use_distributed_sampler=False)`."""

    def __init__(
        self,
        store: Store,
        seed: int,
        seq_len: int,
        global_batch: int,
        micro_batch: int,
        max_steps: int,
        validation_tokens: int | None,
        validation_document_tokens: int | None = None,
        devices: int = 1,
    ) -> None:
        super().__init__()
        self.store = store
        self._train = {"seed": seed, "global_batch": global_batch, "max_steps": max_steps}
        self._micro_batch = micro_batch
        self._train_WT = windows_of(store.tokens("train"), seq_len)
        self.validation = ValidationSplit.of(store, seq_len, seed, validation_document_tokens)
        self.validation_tokens = validation_tokens
        held_out_WT = self.validation.windows_WT
        for split, windows_WT, needed in (("train", self._train_WT, global_batch), ("validation", held_out_WT, 1)):
            if len(windows_WT) < needed:
                raise UserError(
                    f"the {split} data hold {len(store.tokens(split))} tokens, that is {len(windows_WT)} windows of "
                    f"data.seq_len={seq_len}, but a batch needs {needed}: give more text"
                )
        windows = len(self.validation.drawn(validation_tokens))
        if windows < devices:
            raise UserError(
                f"{windows} windows of the validation data are less than trainer.devices={devices}: "
                "give more text, or raise data.validation_tokens"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps until every window has been shown, but for those that fill no whole batch."""
        return len(self._train_WT) // self._train["global_batch"]

    def train_dataloader(self) -> TrainBatches:
        """Return this rank's micro-batches, from step 0 unless Lightning restores a state."""
        rank, world_size = self._place()
        return TrainBatches(
            self._train_WT,
            self.store.fingerprints["tokens"],
            micro_batch=self._micro_batch,
            rank=rank,
            world_size=world_size,
            **self._train,
        )

    def val_dataloader(self) -> ValidationBatches:
        """Return this rank's part of the validation windows along the way."""
        return self.held_out(self.validation_tokens)

    def held_out(self, tokens: int | None) -> ValidationBatches:
        """Return this rank's part of the validation windows for `tokens`; None: of the whole split."""
        return self.validation.batches(tokens, self._micro_batch, *self._place())

    def held_out_of_all_ranks(self, tokens: int) -> ValidationBatches:
        """Return all validation windows for `tokens`."""
        return self.validation.batches(tokens, self._micro_batch)

    def _place(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
