"""Documents to ids in several threads, in order: the same bytes for any number of them."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simbal.data.document import Document
from simbal.data.sources import Encoder

GROUP = 1 << 20  # bytes of text that a thread encodes at once


class Encoded(NamedTuple):
    """A document and its ids, end of text included."""

    document: Document
    ids: NDArray[np.uint32]
    num_bytes: int  # of text that the ids stand for


class Encoders:
    """Threads that encode, the same ones from the first document to the last; None: one per core."""

    def __init__(self, encoder: Encoder, threads: int | None) -> None:
        self._encoder = encoder
        self.threads = threads or os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self.threads)

    def __enter__(self) -> "Encoders":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def encode(self, documents: Iterable[Document]) -> Iterator[list[Encoded]]:
        """Group after group.

        Raises:
            IndexError: an id is not below the vocabulary size, which a narrower type would wrap around without a word.
        """
        waiting: deque[Future[list[Encoded]]] = deque()
        for group in _groups(documents):
            waiting.append(self._pool.submit(self._encode_group, group))
            if len(waiting) > 2 * self.threads:  # the reader is ahead: bounds the memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _encode_group(self, group: list[Document]) -> list[Encoded]:
        eot, encoded = np.uint32(self._encoder.eot), []
        for document in group:
            ids = np.append(self._encoder.encode(document.content), eot)
            encoded.append(Encoded(document, ids, int(self._encoder.byte_len[ids].sum())))
        return encoded


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document.content)
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group
