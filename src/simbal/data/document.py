"""A document of text, and the interfaces of sources, which yield documents, and of encoders, which tokenize them."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

SPLITS = TRAIN, VALIDATION = ("train", "validation")


class Document(NamedTuple):
    """A piece of text that belongs to one split."""

    split: str  # one of SPLITS
    content: bytes  # its UTF-8, or the symbols of a synthetic document
    digest: bytes  # sha256 of `content`
    done: float  # fraction of the source's input that has been read, 0 to 1


class Source(Protocol):
    """A source of documents of the two splits."""

    def identity(self) -> dict[str, Any]:
        """Return everything that determines the documents, as JSON values, without reading them or using a network."""

    def units(self, splits: Sequence[str] = SPLITS) -> list[str]:
        """Return the names of the inputs that may hold documents of `splits`; a build resumes after whole units."""

    def read(self, unit: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yield a unit's documents in a fixed order; count skipped or changed records in `skipped`, by reason.

        Raises:
            UserError: for the first bad input, with its position.
        """

    def with_ends_held_out(self) -> "Source | None":
        """Return the source that holds out the end of each document instead of whole ones; None: it cannot."""


class Encoder(Protocol):
    """An encoder of a document's content into token ids."""

    vocab_size: int  # every id is below it
    eot: int  # the id that the store puts after every document
    byte_len: NDArray[np.uint16]  # bytes of text that each id stands for, (V,); 0 for `eot`
    table_sha256: str | None  # of the token table, if it has one

    def encode(self, content: bytes) -> NDArray[np.uint32]:
        """Return the ids of one document, without `eot`."""


def digest_of(content: bytes) -> bytes:
    """Return the sha256 of a document's content, 32 bytes."""
    return hashlib.sha256(content).digest()


def split_of(digest: bytes, validation_one_in: int) -> str:
    """Return a document's split: its own hash holds out about one in `validation_one_in`.

    So adding a file moves no other document to another split.
    """
    return VALIDATION if int.from_bytes(digest[:8], "big") % validation_one_in == 0 else TRAIN
