"""The interfaces of sources and encoders, and the choice of both by `data.source`."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from simbal.config.schema import DataConfig
from simbal.data.document import Document
from simbal.data.sources.dclm import DCLM
from simbal.data.sources.files import Files
from simbal.data.sources.pysource import PySource
from simbal.data.sources.synthetic import Symbols, Synthetic


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
    """An encoder of a document's content into token ids below `vocab_size`."""

    @property
    def vocab_size(self) -> int:
        """The number of ids."""

    @property
    def eot(self) -> int:
        """The id that the store puts after every document."""

    @property
    def byte_len(self) -> NDArray[np.uint16]:
        """Bytes of text that each id stands for, (V,); 0 for `eot`."""

    @property
    def table_sha256(self) -> str | None:
        """The sha256 of the token table, or None if there is none."""

    def encode(self, content: bytes) -> NDArray[np.uint32]:
        """Return the ids of one document, without `eot`."""


SOURCES: dict[str, Any] = {"pysource": PySource, "files": Files, "dclm": DCLM, "synthetic": Synthetic}


def open_source(data: DataConfig) -> Source:
    """Return the source that `data.source` names, made from the keys it asks for."""
    source = SOURCES[data.source]
    opened: Source = source(**{field.name: getattr(data, field.name) for field in fields(source)})
    return opened


def open_encoder(data: DataConfig) -> Encoder:
    """Return the encoder of a source: the identity for synthetic symbols, cl100k_base for text."""
    if data.source == "synthetic":
        return Symbols(data.vocab_size)
    from simbal.data.tokenizer import load_tokenizer

    return load_tokenizer(data.vocab_size, data.tokenizer_path)
