"""The source `synthetic`: a Markov chain of known entropy, without files or a tokenizer, a function of its seed."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simbal.data.document import SPLITS, TRAIN, VALIDATION, Document, digest_of
from simbal.errors import UserError

CHAIN, WALK = 0, 1  # keep the random streams of successors and of documents apart


class Symbols:
    """The encoder of documents that hold ids already; each symbol counts as one byte."""

    table_sha256: str | None = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eot = vocab_size - 1
        self.byte_len: NDArray[np.uint16] = np.ones(vocab_size, np.uint16)
        self.byte_len[self.eot] = 0

    def encode(self, content: bytes) -> NDArray[np.uint32]:
        """Return the ids that a synthetic document holds."""
        return np.frombuffer(content, "<u4")


@dataclass(frozen=True)
class Synthetic:
    """A Markov chain whose symbols have `branching` successors each, equally probable.

    Its entropy rate is exactly ln(branching) nats. Document i is a function of (seed, i) alone. Training has the first
    `documents` of them, validation the next few.
    """

    vocab_size: int  # its last id is end of text, the others are the symbols
    branching: int
    documents: int
    document_tokens: int
    chain_seed: int
    validation_one_in: int

    def __post_init__(self) -> None:
        if not 1 <= self.branching < self.vocab_size:
            raise UserError(f"data.branching={self.branching} must lie between 1 and {self.vocab_size - 1} symbols")

    def identity(self) -> dict[str, Any]:
        """Return all keys of the source, as each of them decides the documents."""
        return asdict(self)

    def units(self, splits: Sequence[str] = SPLITS) -> list[str]:
        """Return the single unit."""
        return ["chain"]

    def with_ends_held_out(self) -> None:
        """Return None: whole documents are held out."""

    def read(self, unit: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yield the training documents, then those of validation; none is skipped."""
        successors = [self._successors(symbol) for symbol in range(self.vocab_size - 1)]
        total = self.documents + math.ceil(self.documents / self.validation_one_in)
        for index in range(total):
            content = self._walk(successors, index).astype("<u4").tobytes()
            split = TRAIN if index < self.documents else VALIDATION
            yield Document(split, content, digest_of(content), (index + 1) / total)

    def _successors(self, symbol: int) -> list[int]:
        random = np.random.default_rng([self.chain_seed, CHAIN, symbol])
        return [int(successor) for successor in random.choice(self.vocab_size - 1, self.branching, replace=False)]

    def _walk(self, successors: list[list[int]], index: int) -> NDArray[np.int64]:
        """Return the symbols of document `index`: the first drawn from all, then one successor after the other."""
        random = np.random.default_rng([self.chain_seed, WALK, index])
        symbols = [int(random.integers(self.vocab_size - 1))]
        for choice in random.integers(self.branching, size=self.document_tokens - 1).tolist():
            symbols.append(successors[symbols[-1]][choice])
        return np.array(symbols)
