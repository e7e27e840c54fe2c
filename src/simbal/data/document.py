"""A document as a store takes it, and the interfaces of what gives documents and of what encodes them."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

SPLITS = ("train", "validation")


class Document(NamedTuple):
    """A piece of text that is held out, or not, as a whole."""

    split: str  # one of SPLITS
    input: str  # the file or package it came from
    content: bytes  # its UTF-8, or the symbols of a synthetic one
    digest: bytes  # sha256 of `content`
    done: float  # share of all the source's input that has been read with this document, 0 to 1


class Source(Protocol):
    """A source of documents of the two splits; its dataclass fields are keys of `conf/data/<source>.yaml`."""

    def identity(self) -> dict[str, Any]:
        """Return all that decides the documents, as JSON values, without reading them or asking a network."""

    def units(self) -> list[str]:
        """Return the names of the parts that are read in turn; an interrupted build goes on with the next of them."""

    def read(self, unit: str, skipped: Counter[str]) -> Iterator[Document]:
        """Yield a unit's documents, always in one order; count what is left out or changed in `skipped`, by reason.

        Raises:
            UserError: for the first bad input, with its position.
        """


class Encoder(Protocol):
    """An encoder of a document's content into token ids."""

    vocab_size: int  # every id is below it
    eot: int  # the id that the store puts after every document
    byte_len: NDArray[np.uint16]  # bytes of text that each id stands for, (V,); 0 for `eot`
    table_sha256: str | None  # of the token table, if there is one

    def encode(self, content: bytes) -> NDArray[np.uint32]:
        """Return the ids of one document, without `eot`."""


def digest_of(content: bytes) -> bytes:
    """Return the sha256 of a document's content, the 32 bytes that identify it."""
    return hashlib.sha256(content).digest()


def split_of(digest: bytes, validation_one_in: int) -> str:
    """Return a document's split: about one in `validation_one_in` is held out, by the document's own hash.

    Adding a file then moves no other document to another split.
    """
    return SPLITS[int.from_bytes(digest[:8], "big") % validation_one_in == 0]
