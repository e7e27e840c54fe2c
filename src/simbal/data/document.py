"""A document as a store takes it, and the split that it belongs to."""

import hashlib
from typing import NamedTuple

SPLITS = ("train", "validation")


class Document(NamedTuple):
    """A piece of text that is held out, or not, as a whole."""

    split: str  # one of SPLITS
    input: str  # the file or package it came from
    content: bytes  # its UTF-8, or the symbols of a synthetic one
    digest: bytes  # sha256 of `content`
    done: float  # share of all the source's input that has been read with this document, 0 to 1


def digest_of(content: bytes) -> bytes:
    """Return the sha256 of a document's content, the 32 bytes that identify it."""
    return hashlib.sha256(content).digest()


def split_of(digest: bytes, validation_one_in: int) -> str:
    """Return a document's split: about one in `validation_one_in` is held out, by the document's own hash.

    Adding a file then moves no other document to another split.
    """
    return SPLITS[int.from_bytes(digest[:8], "big") % validation_one_in == 0]
