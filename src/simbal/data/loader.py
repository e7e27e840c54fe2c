"""Batches of tokens. Training batch s depends on (seed, s) only, not on the number of ranks or micro-batches.

A window is a sequence and its last target: window i of a split consists of tokens [i*S, i*S + S + 1). Sequences may
span several documents.

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


def split_into_windows(tokens: NDArray[Any], seq_len: int) -> NDArray[Any]:
    """Return all windows, (W, T), as a view."""
    if len(tokens) <= seq_len:
        return np.empty((0, seq_len + 1), tokens.dtype)
    return sliding_window_view(tokens, seq_len + 1)[::seq_len]


def batch_windows(seed: int, step: int, num_windows: int, global_batch: int) -> NDArray[np.int64]:
    """Return the indices of the windows of optimizer step `step`, (G,).

    An epoch has as many complete batches as fit. Each epoch has a new order.
    """
    epoch, position = divmod(step, num_windows // global_batch)
    return _epoch_order(seed, epoch, num_windows)[position * global_batch : (position + 1) * global_batch]


@lru_cache(maxsize=1)
def _epoch_order(seed: int, epoch: int, num_windows: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_windows)


def _gather(windows_WT: NDArray[Any], indices: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(windows_WT[indices].astype(np.int64))


@dataclass(eq=False)
class TrainBatches:
    """The micro-batches of a complete run, each (B, T) int64; a new iterator continues after the last step.

    Lightning saves and restores its state. Without `__len__` Lightning would fetch one batch ahead, which a resumed run
    would skip.
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
        self.accumulation, remainder = divmod(self.global_batch, self.micro_batch * self.world_size)
        assert not remainder, "the config allows only micro-batches that add up to the global batch"
        self._yielded = 0

    def __len__(self) -> int:
        return self.max_steps * self.accumulation

    def __iter__(self) -> Iterator[Tensor]:
        while self._yielded < len(self):
            step, part = divmod(self._yielded, self.accumulation)
            self._yielded += 1  # before the yield, because Lightning saves the state while the generator is suspended
            yield self._batch(step, part)

    def micro_batches(self, step: int) -> list[Tensor]:
        """Return this rank's micro-batches of an optimizer step."""
        return [self._batch(step, part) for part in range(self.accumulation)]

    def _batch(self, step: int, part: int) -> Tensor:
        windows_G = batch_windows(self.seed, step, len(self.windows_WT), self.global_batch)
        start = (part * self.world_size + self.rank) * self.micro_batch
        return _gather(self.windows_WT, windows_G[start : start + self.micro_batch])

    @property
    def _identity(self) -> dict[str, int | str]:
        """The values that determine the batches of all steps."""
        return {
            "seed": self.seed,
            "global_batch": self.global_batch,
            "num_windows": len(self.windows_WT),
            "tokens_fingerprint": self.tokens_fingerprint,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the finished optimizer steps, the micro-batches of the next step, and the identity of the batches."""
        step, part = divmod(self._yielded, self.accumulation)
        return {"step": step, "part": part, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the saved step.

        Raises:
            UserError: the state belongs to other batches or was saved inside a step.
        """
        for key, value in self._identity.items():
            if state[key] != value:
                raise UserError(f"the checkpoint was trained with {key}={state[key]}, not {value}: start a new run")
        if state["part"]:
            raise UserError(f"the checkpoint was saved inside step {state['step']}, not after it: start a new run")
        self._yielded = state["step"] * self.accumulation


class ValidationBatch(NamedTuple):
    """A batch of validation windows, (B, T), and the document of each target, (B, S); int64.

    If a rank has fewer batches than the others, its last batch has no documents and is not counted.
    """

    windows_BT: Tensor
    documents_BS: Tensor


@dataclass(frozen=True)
class ValidationSplit:
    """The windows of the validation split, and random samples of them.

    Windows beyond the first `document_tokens` of their document are excluded, because a few long documents would
    dominate a mean over tokens. A sample depends only on the data seed, so all arms use the same sample. A smaller
    sample is a subset of a larger one.
    """

    windows_WT: NDArray[Any]
    document_ends: NDArray[np.uint64]  # the position after each document, (documents,)
    seed: int
    document_tokens: int | None = None

    @classmethod
    def of(cls, store: Store, seq_len: int, seed: int, document_tokens: int | None) -> Self:
        """Return the validation split of a store in windows of `seq_len` tokens and the last target."""
        windows_WT = split_into_windows(store.tokens("validation"), seq_len)
        return cls(windows_WT, store.document_ends("validation"), seed, document_tokens)

    @property
    def seq_len(self) -> int:
        """Targets per window."""
        return int(self.windows_WT.shape[1]) - 1

    @cached_property
    def included(self) -> NDArray[np.int64]:
        """The indices of all windows that are not excluded, in file order."""
        windows_W = np.arange(len(self.windows_WT))
        if self.document_tokens is None:
            return windows_W
        starts = np.concatenate([[0], self.document_ends]).astype(np.int64)
        first_target_W = windows_W * self.seq_len + 1
        document_W = self._document_of(first_target_W)
        is_near_start_W = first_target_W - starts[document_W] < self.document_tokens
        has_new_document_W = document_W != self._document_of(first_target_W + self.seq_len - 1)
        included_W: NDArray[np.int64] = windows_W[is_near_start_W | has_new_document_W]
        return included_W

    def sample(self, tokens: int | None) -> NDArray[np.int64]:
        """Return the indices of as many windows as fit `tokens`, at least one, in file order; None: all."""
        if tokens is None:
            return self.included
        num_windows = max(1, tokens // self.seq_len)
        # three numbers: the seed of a training epoch has two, so the two never coincide
        order = np.random.Generator(np.random.PCG64([self.seed, 0, 1])).permutation(len(self.included))
        return self.included[np.sort(order[:num_windows])]

    def documents(self, windows_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the document of each target of these windows, (B, S)."""
        return self._document_of(windows_B[:, None] * self.seq_len + np.arange(1, self.seq_len + 1))

    def _document_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        documents: NDArray[np.int64] = np.searchsorted(self.document_ends, positions, side="right")
        return documents

    def batches(self, tokens: int | None, micro_batch: int, rank: int = 0, world_size: int = 1) -> "ValidationBatches":
        """Return this rank's part of the sample for `tokens` as batches."""
        windows_W = self.sample(tokens)
        return ValidationBatches(self, windows_W[rank::world_size], micro_batch, len(windows_W[::world_size]))


@dataclass(frozen=True)
class ValidationBatches:
    """Validation windows in file order as `ValidationBatch`es; the last one may be smaller.

    Rank r of R gets every R-th window from r on. All ranks have the same number of batches, as ranks of a sharded model
    wait for each other in each forward pass.
    """

    split: ValidationSplit
    windows_W: NDArray[np.int64]  # of this rank
    micro_batch: int
    max_windows: int  # of a rank

    def __len__(self) -> int:
        return math.ceil(self.max_windows / self.micro_batch)

    def __iter__(self) -> Iterator[ValidationBatch]:
        for start in range(0, self.max_windows, self.micro_batch):
            windows_B = self.windows_W[start : start + self.micro_batch]
            documents_BS = torch.from_numpy(self.split.documents(windows_B))
            nonempty_B = windows_B if len(windows_B) else self.windows_W[:1]
            yield ValidationBatch(_gather(self.split.windows_WT, nonempty_B), documents_BS)


class TokenData(LightningDataModule):
    """The batches of a store's two splits; needs `Trainer(use_distributed_sampler=False)`."""

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
        self._train = {"seed": seed, "global_batch": global_batch, "max_steps": max_steps, "micro_batch": micro_batch}
        self.train_windows = split_into_windows(store.tokens("train"), seq_len)  # (W, T)
        self.validation = ValidationSplit.of(store, seq_len, seed, validation_document_tokens)
        self.validation_tokens = validation_tokens
        if len(self.train_windows) < global_batch:
            windows = f"{len(self.train_windows)} windows of data.seq_len={seq_len}"
            raise UserError(f"the train split has {windows}, but trainer.global_batch needs {global_batch}: add text")
        num_windows = len(self.validation.sample(validation_tokens))
        if num_windows < devices:
            remedy = "add text, lower data.seq_len or raise data.validation_tokens"
            raise UserError(f"{num_windows} validation windows are fewer than trainer.devices={devices}: {remedy}")

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch of complete batches."""
        return len(self.train_windows) // self._train["global_batch"]

    @property
    def windows_read(self) -> int:
        """Training windows that the complete run reads, over all epochs."""
        return self._train["max_steps"] * self._train["global_batch"]

    def train_dataloader(self) -> TrainBatches:
        """Return this rank's training batches, from step 0 unless Lightning restores a state."""
        rank, world_size = self._rank()
        fingerprint = self.store.fingerprints["tokens"]
        return TrainBatches(self.train_windows, fingerprint, rank=rank, world_size=world_size, **self._train)

    def val_dataloader(self) -> ValidationBatches:
        """Return this rank's validation batches during training."""
        return self.validation_batches(self.validation_tokens)

    def validation_batches(self, tokens: int | None, all_ranks: bool = False) -> ValidationBatches:
        """Return the validation batches of this rank or of all ranks together for `tokens`; None: the full split."""
        return self.validation.batches(tokens, self._train["micro_batch"], *(() if all_ranks else self._rank()))

    def _rank(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
