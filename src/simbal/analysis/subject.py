"""The model that an analysis measures: a trained run or a Hugging Face model, with its validation split.

Shapes: B sequences, S sequence length, T = S + 1, N tokens, Q new tokens, L MoE layers, E experts, K experts per token,
D model width, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from rich.progress import track
from torch import Tensor

from simbal.data.loader import ValidationBatch, ValidationSplit
from simbal.data.tokenizer import HubTokenizer, Tokenizer
from simbal.errors import UserError
from simbal.model.expert_similarity import ExpertSimilarity
from simbal.model.router import Routing, Steering


class NotApplicableError(UserError):
    """The analysis cannot measure this model with any settings. With several models, this one is skipped."""


@dataclass(frozen=True)
class Predicted:
    """A batch of validation windows with the model's predictions."""

    windows_BT: Tensor
    documents_BS: Tensor  # index of the document that each target belongs to
    nll_BS: Tensor  # -log p of each target, in nats
    routings: list[Routing]  # one per MoE layer; empty for a dense model


class LayerRouter(Protocol):
    """The attributes of a router that analyses read."""

    @property
    def weight_ED(self) -> Tensor:
        """The router weight, one row per expert."""

    @property
    def top_k(self) -> int:
        """Experts per token."""

    @property
    def gating(self) -> str:
        """The function that maps logits to probabilities: softmax, sigmoid, sqrtsoftplus or relu."""


class Pruned(Protocol):
    """A rule that decides which of the chosen experts are computed."""

    def kept(self, weights_NK: Tensor) -> Tensor:
        """Return a mask of the chosen experts to compute, (N, K) bool."""

    def weights(self, weights_NK: Tensor, kept_NK: Tensor) -> Tensor:
        """Return the gate weights, (N, K), with 0 for experts that are not computed."""


class Subject(ABC):
    """A model in evaluation mode with its validation split."""

    path: Path  # identifies the model in messages
    device: torch.device
    validation: ValidationSplit
    precisions: dict[str, str]  # in training (`trained`) and in analyses on this device (`analyzed`)
    bytes_of_token_V: Tensor | None  # UTF-8 bytes of each token id, or None if unknown
    backend: str | None  # of the experts
    ragged: bool = False  # whether the number of experts varies by token
    reads: ClassVar[str]  # precedes "`seq_len` tokens" in messages, such as "the run was trained on"
    precision_note: ClassVar[str]  # printed if the two `precisions` differ

    @property
    @abstractmethod
    def steering(self) -> Steering:
        """The `Steering` that chooses the experts in all layers."""

    @property
    @abstractmethod
    def routers(self) -> Sequence[LayerRouter]:
        """The router of each MoE layer; empty for a dense model. `UserError` for an unknown kind of router."""

    @abstractmethod
    def inference(self) -> AbstractContextManager[None]:
        """Return a context manager that disables gradients and sets the device's precision."""

    @abstractmethod
    def predict(
        self, batch_size: int, tokens: int | None = None, steering: Steering | None = None
    ) -> Iterator[Predicted]:
        """Yield the model's predictions for each batch; `steering`, if given, replaces the model's own."""

    @abstractmethod
    def inputs(self) -> AbstractContextManager[list[Tensor]]:
        """Return a context manager that yields a list with the last input (N, D) of each MoE layer."""

    @abstractmethod
    def similarity(self) -> AbstractContextManager[ExpertSimilarity]:
        """Return a context manager that measures expert similarity in each forward pass."""

    @abstractmethod
    def pruned(self, pruning: Pruned) -> AbstractContextManager[list[int]]:
        """Return a context manager that prunes experts and yields the (token, expert) pairs computed by each layer."""

    @abstractmethod
    def variant(self, against: str | None, dtype: str | None = None, backend: str | None = None) -> "Subject":
        """Load the model again to compare it with itself on the same validation windows.

        Args:
            against: path of another model to load; None: this one.
            dtype: float32, bfloat16 or float16; None: the dtype of this model.
            backend: backend of the experts; None: the default.

        Raises:
            UserError: the other model cannot be compared, or the dtype or backend is unknown.
        """

    @abstractmethod
    def tokenizer(self) -> Tokenizer | HubTokenizer:
        """Return the tokenizer; `UserError` if the model reads no text."""

    @abstractmethod
    def decoder(self) -> Callable[[Tensor], Tensor]:
        """Return a function that takes the next ids (B, Q) and returns the logits (B, V) after the last of them."""

    @abstractmethod
    def every_expert_flops(self) -> float:
        """Return the FLOPs of a forward pass that also computes all experts, as a multiple of a plain forward pass."""

    @property
    def num_experts(self) -> int:
        """Experts per layer; 0 for a dense model."""
        return len(self.routers[0].weight_ED) if self.routers else 0

    @property
    def top_k(self) -> int:
        """Experts per token; 0 for a dense model."""
        return self.routers[0].top_k if self.routers else 0

    @property
    def seq_len(self) -> int:
        """Tokens per sequence."""
        return self.validation.seq_len

    @property
    def choosable(self) -> int:
        """The number of experts that a token can choose from."""
        return self.num_experts

    def sequences(self, batch_size: int) -> int:
        """Return the actual number of sequences per batch for a requested `batch_size`."""
        return batch_size

    def batches(self, batch_size: int, tokens: int | None = None) -> Iterator[ValidationBatch]:
        """Yield validation windows on the device, in file order: a sample of `tokens` tokens, or all if None."""
        for windows_BT, documents_BS in self.validation.batches(tokens, self.sequences(batch_size)):
            yield ValidationBatch(windows_BT.to(self.device), documents_BS.to(self.device))

    def track_predictions(
        self, title: str, batch_size: int, tokens: int | None = None, steering: Steering | None = None
    ) -> Iterator[Predicted]:
        """Call `predict` and show a progress bar."""
        num_batches = len(self.validation.batches(tokens, self.sequences(batch_size)))
        yield from track(self.predict(batch_size, tokens, steering), title, num_batches, transient=True)

    def num_sequences(self, tokens: int | None = None) -> int:
        """Return the number of validation windows in a sample of `tokens` tokens, or in the whole split if None."""
        return len(self.validation.sample(tokens))


def require_routers(subject: Subject, analysis: str) -> Sequence[LayerRouter]:
    """Return the routers; `NotApplicableError` for a dense model."""
    if not subject.routers:
        raise NotApplicableError(f"analysis={analysis} needs routers, but {subject.path} is a dense model")
    return subject.routers


def require_fixed_top_k(subject: Subject, analysis: str) -> Sequence[LayerRouter]:
    """Return the routers; `NotApplicableError` for a dense model, or if the number of experts varies by token."""
    routers = require_routers(subject, analysis)
    if subject.ragged:
        raise NotApplicableError(
            f"analysis={analysis} needs K experts for every token, but the strategy of {subject.path} varies the number"
        )
    return routers


def require_choice(subject: Subject, analysis: str) -> Sequence[LayerRouter]:
    """Return the routers; `NotApplicableError` unless every token chooses K of more experts."""
    routers = require_fixed_top_k(subject, analysis)
    if subject.choosable == subject.top_k:
        raise NotApplicableError(
            f"analysis={analysis} needs a choice of experts, but each token of {subject.path} gets all experts"
        )
    return routers
