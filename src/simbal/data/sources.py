"""Where documents come from: what a source is, and which one `data.source` names."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from simbal.data.dclm import DCLM
from simbal.data.document import Document
from simbal.data.files import Files
from simbal.data.pysource import PySource
from simbal.data.synthetic import Symbols, Synthetic


class Source(Protocol):
    """Yields documents of the two splits; its dataclass fields are keys of `conf/data/<source>.yaml`."""

    def identity(self) -> dict[str, Any]:
        """Everything that decides the documents, as JSON values and found without reading them or asking a network."""

    def units(self) -> list[str]:
        """Names of the parts that are read one after the other; an interrupted build goes on with the next of them."""

    def read(self, unit: str, skipped: Counter[str]) -> Iterator[Document]:
        """A unit's documents, always in one order; counts what it left out or changed in `skipped`, by reason.

        Raises:
            UserError: for the first bad input, with its position.
        """


class Encoder(Protocol):
    """Turns a document's content into token ids below `vocab_size`."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def eot(self) -> int:
        """The id that the store puts after every document."""

    @property
    def byte_len(self) -> NDArray[np.uint16]:
        """(V,) bytes of text that each id stands for; 0 for `eot`."""

    @property
    def table_sha256(self) -> str | None:
        """Of the token table, if there is one."""

    def encode(self, content: bytes) -> NDArray[np.uint32]:
        """The ids of one document, without `eot`."""


SOURCES: dict[str, Any] = {"pysource": PySource, "files": Files, "dclm": DCLM, "synthetic": Synthetic}


def open_source(data: dict[str, Any]) -> Source:
    """The source that `data["source"]` names, made from the keys it asks for."""
    source = SOURCES[data["source"]]
    opened: Source = source(**{field.name: data[field.name] for field in fields(source)})
    return opened


def open_encoder(data: dict[str, Any]) -> Encoder:
    """Symbols stand for themselves; text goes through cl100k_base."""
    if data["source"] == "synthetic":
        return Symbols(data["vocab_size"])
    from simbal.data.tokenizer import load_tokenizer

    return load_tokenizer(data["vocab_size"], data["tokenizer_path"])
