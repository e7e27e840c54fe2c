"""What an analysis measures: a model with its validation windows, a trained run or a model of Hugging Face.

Shapes: B sequences, S sequence length, T = S + 1, N tokens, Q new tokens, L MoE layers, E experts, K experts per token,
D model width, V ids.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from simbal.config.values import whole_number
from simbal.data.loader import HeldOut, ValidationSplit
from simbal.errors import UserError
from simbal.model.expert_similarity import ExpertSimilarity
from simbal.model.router import Groups, Routing, Steering


class UnsuitedError(UserError):
    """There is nothing here that the analysis could be of, whatever its keys; where there is more, it is left out."""


@dataclass(frozen=True)
class Predicted:
    """A batch of validation windows, with the model's predictions for it."""

    windows_BT: Tensor
    documents_BS: Tensor  # the document of each target
    nll_BS: Tensor  # -log p of each target, in nats
    routings: list[Routing]  # of each MoE layer; none if dense


class LayerRouter(Protocol):
    """The router of an MoE layer, as far as analyses read it."""

    @property
    def weight_ED(self) -> Tensor:
        """The weight, a row for each expert."""

    @property
    def top_k(self) -> int:
        """Experts per token."""

    @property
    def gating(self) -> str:
        """What makes probabilities of logits: softmax or sigmoid."""


class Pruned(Protocol):
    """A rule for which chosen experts are computed."""

    def kept(self, weights_NK: Tensor) -> Tensor:
        """Return which choices stay, (N, K) bool."""

    def weights(self, weights_NK: Tensor, kept_NK: Tensor) -> Tensor:
        """Return the weights of the experts' outputs, (N, K): 0 for one that is not computed."""


class TextTokenizer(Protocol):
    """A tokenizer that also turns ids back into text."""

    eot: int

    def encode(self, content: bytes) -> NDArray[np.uint32]:
        """Return the ids of UTF-8 `content`, without `eot`."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; bytes that are no UTF-8 become U+FFFD."""

    @property
    def drawable_V(self) -> NDArray[np.bool_]:
        """Whether each id can be drawn: those that text is made of, and end of text."""


class Subject(ABC):
    """A model in evaluation mode with its validation split: the one interface of all analyses."""

    path: Path  # what messages call it by
    device: torch.device
    validation: ValidationSplit
    reads: ClassVar[str]  # what a sentence says of `seq_len` tokens, such as: the run was trained on
    precision_note: ClassVar[str]  # shown where the two `precisions` differ

    @property
    @abstractmethod
    def precisions(self) -> dict[str, str]:
        """The precision that it was `trained` in, and that in which it is `analysed` on this device."""

    @property
    @abstractmethod
    def seq_len(self) -> int:
        """Tokens that are read at once."""

    @property
    @abstractmethod
    def bytes_of_token_V(self) -> Tensor | None:
        """UTF-8 bytes that each id stands for; None: they are not known."""

    @property
    @abstractmethod
    def steering(self) -> Steering:
        """What says how its routers choose, as they do by themselves."""

    @property
    def ragged(self) -> bool:
        """Whether a token may have more or fewer experts than K, which no model of Hugging Face does."""
        return False

    @property
    @abstractmethod
    def backend(self) -> str | None:
        """What computes the experts; None in a dense model."""

    @property
    @abstractmethod
    def routers(self) -> Sequence[LayerRouter]:
        """The router of every MoE layer, first layer first; none in a dense model.

        Raises:
            UserError: there are some, but not of a kind that is known.
        """

    @abstractmethod
    def inference(self) -> AbstractContextManager[None]:
        """Compute without gradients within the block, in the precision of the device."""

    @abstractmethod
    def predict(
        self, batch_size: int, tokens: int | None = None, steering: Steering | None = None
    ) -> Iterator[Predicted]:
        """Yield the model's predictions for each batch; routers choose as the model does, or as `steering` says."""

    @abstractmethod
    def inputs(self) -> AbstractContextManager[list[Tensor]]:
        """Yield a list that holds the last input (N, D) of each MoE layer after every forward pass in the block."""

    @abstractmethod
    def similarity(self) -> AbstractContextManager[ExpertSimilarity]:
        """Measure in every forward pass within the block how alike the experts are; the passes stay as they are."""

    @abstractmethod
    def pruned(self, pruning: Pruned) -> AbstractContextManager[list[int]]:
        """Compute only what `pruning` keeps within the block; yield how many choices each layer has kept so far."""

    @abstractmethod
    def tokenizer(self) -> TextTokenizer:
        """Return the tokenizer; `UserError` if there is no text."""

    @abstractmethod
    def decoder(self) -> Callable[[Tensor], Tensor]:
        """Return a function that is given the next ids (B, Q) of B samples, and returns the logits after the last."""

    @abstractmethod
    def every_expert_flops(self) -> float:
        """Return the FLOPs of a pass with all experts beside the chosen ones, divided by those of a plain pass."""

    @property
    def num_experts(self) -> int:
        """Experts in a layer; 0 in a dense model."""
        return len(self.routers[0].weight_ED) if self.routers else 0

    @property
    def top_k(self) -> int:
        """Experts per token; 0 in a dense model."""
        return self.routers[0].top_k if self.routers else 0

    @property
    def groups(self) -> Groups | None:
        """The groups of experts that limit a token's choice, or None."""
        return None

    @property
    def choosable(self) -> int:
        """The experts among which a token's are chosen: those of its best groups, where there are groups."""
        return self.num_experts * self.groups.chosen // self.groups.count if self.groups else self.num_experts

    def sequences(self, batch_size: int) -> int:
        """Return how many sequences are read at once where an analysis asks for `batch_size`."""
        return batch_size

    def batches(self, batch_size: int, tokens: int | None = None) -> Iterator[HeldOut]:
        """Yield validation windows on the device, in file order: those drawn for `tokens`, as in training, or all."""
        for windows_BT, documents_BS in self.validation.batches(tokens, self.sequences(batch_size)):
            yield HeldOut(windows_BT.to(self.device), documents_BS.to(self.device))

    def num_batches(self, batch_size: int, tokens: int | None = None) -> int:
        """Return how many batches `batches` yields."""
        return len(self.validation.batches(tokens, self.sequences(batch_size)))

    def num_tokens(self, tokens: int | None = None) -> int:
        """Return how many tokens are predicted where an analysis asks for `tokens`."""
        return len(self.validation.drawn(tokens)) * self.seq_len


def check_pass(analysis: str, tokens: int | None, batch_size: int) -> None:
    """Raise `UserError` for a `batch_size` or `tokens` below 1, the keys of analyses of the validation split."""
    whole_number(f"analysis.{analysis}.batch_size", batch_size, 1)
    if tokens is not None:
        whole_number(f"analysis.{analysis}.tokens", tokens, 1)


def routers_of(subject: Subject, analysis: str) -> Sequence[LayerRouter]:
    """Return the routers, first layer first; `UnsuitedError` for a dense model."""
    if not subject.routers:
        raise UnsuitedError(f"{subject.path} is a dense model: analysis={analysis} works on routers")
    return subject.routers


def fixed_choices_of(subject: Subject, analysis: str) -> Sequence[LayerRouter]:
    """Return the routers; `UnsuitedError` for a dense model, or one that gives a token any number of experts."""
    routers = routers_of(subject, analysis)
    if subject.ragged:
        raise UnsuitedError(
            f"analysis={analysis} is of K experts for every token, and the strategy of {subject.path} gives a token "
            "any number"
        )
    return routers
